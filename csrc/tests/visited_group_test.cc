// A group that is closed while threads use it, also by these threads.
#include "visited_group.h"

#include <chrono>
#include <thread>

#include "tests/check.h"
#include "tests/network_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

// Two ranks; the test visits the group of the first one.
class Pair {
 public:
  Pair() : first(std::make_shared<VisitedGroup>(options_of(0), shared_buffers, std::make_shared<Hub>())),
           second(options_of(1), shared_buffers, hub) {
    const std::vector<std::string> introductions{Visit(*first)->introduce(), second.introduce()};
    const Visit visit(*first);
    visit->join(introductions, secret_of(7), Deadline::after(60));
    second.join(introductions, secret_of(7), Deadline::after(60));
    visit->start(true);
    second.start(true);
  }

  static GroupOptions options_of(int rank) {
    GroupOptions options;
    options.rank = rank;
    options.hosts = {0, 0};
    return options;
  }

  SharedBuffers shared_buffers;
  Hub hub;  // of the second
  std::shared_ptr<VisitedGroup> first;
  Group second;
};

bool is_gone(const std::weak_ptr<VisitedGroup>& group) { return group.expired(); }

// As in a signal handler that interrupts a wait: the closer does not wait for itself, and the interrupted wait fails.
void who_is_in_may_close_and_the_last_one_out_destroys() {
  Pair pair;
  const std::weak_ptr<VisitedGroup> weak = pair.first;
  const int before = open_descriptors();
  char byte = 0;
  {
    const Visit waits(*pair.first);
    const auto message = waits->receive(1, 0, &byte, 1);
    {
      const Visit within(*pair.first);
      pair.first->close();
      pair.first->close();
      CHECK_THROWS(Visit(*pair.first), Code::aborted);
      CHECK_THROWS(within->check(), Code::aborted);
    }
    pair.first.reset();  // as the last owner may release it in the handler
    CHECK(!is_gone(weak));
    CHECK_THROWS(waits->wait(*message, Deadline::after(60)), Code::aborted);
  }
  CHECK(is_gone(weak));
  CHECK(open_descriptors() < before);
}

void who_is_not_in_waits_until_all_are_out() {
  Pair pair;
  std::atomic<int> waiting{0}, freed{0};
  std::vector<std::thread> visitors;
  for (int tag = 0; tag < 3; ++tag) {
    visitors.emplace_back([&, tag] {
      const Visit visit(*pair.first);
      char byte = 0;
      const auto message = visit->receive(1, tag, &byte, 1);
      ++waiting;
      CHECK_THROWS(visit->wait(*message, Deadline::after(60)), Code::aborted);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++freed;
    });
  }
  while (waiting < 3) std::this_thread::yield();
  std::thread other([&] { pair.first->close(); });
  pair.first->close();
  CHECK_EQUAL(freed.load(), 3);
  CHECK_THROWS(Visit(*pair.first), Code::aborted);
  other.join();
  for (std::thread& visitor : visitors) visitor.join();
}

// One thread closes within its visit, and leaves before the others: one of these destroys the group.
void whoever_is_last_destroys() {
  Pair pair;
  const std::weak_ptr<VisitedGroup> weak = pair.first;
  std::atomic<bool> is_in{false}, may_go{false};
  std::thread last([&] {
    const Visit visit(*pair.first);
    is_in = true;
    while (!may_go) std::this_thread::yield();
  });
  while (!is_in) std::this_thread::yield();
  {
    const Visit visit(*pair.first);
    pair.first->close();
  }
  std::thread waiter([group = pair.first] { group->close(); });  // from elsewhere, meanwhile
  pair.first.reset();
  CHECK(!is_gone(weak));
  may_go = true;
  last.join();
  waiter.join();
  CHECK(is_gone(weak));
}

}  // namespace

int main() {
  who_is_in_may_close_and_the_last_one_out_destroys();
  who_is_not_in_waits_until_all_are_out();
  whoever_is_last_destroys();
  return report();
}
