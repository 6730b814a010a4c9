// Which process is named as a reader of this process, for the peers of its groups. What the system does with the name
// depends on Yama.
#include "transport/allowed_reads.h"

#include <unistd.h>

#include <memory>
#include <vector>

#include "tests/check.h"
#include "tests/network_ranks.h"
#include "transport/process.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

// Two forked processes, and one that the first of these forked.
struct Family {
  Family()
      : first([this] {
          const Child child([] { pause(); });
          grandchild->store(child.pid());
          pause();
        }),
        second([] { pause(); }) {
    CHECK(comes_true([&] { return grandchild->load() != 0; }));
  }

  SharedWithChildren<std::atomic<pid_t>> grandchild;
  const Child first, second;
};

void the_nearest_ancestor_is_named_but_never_pid_1(const Family& family, pid_t grandchild) {
  const pid_t self = getpid(), first = family.first.pid(), second = family.second.pid();
  CHECK_EQUAL(nearest_ancestor({first}), first);
  CHECK_EQUAL(nearest_ancestor({first, first}), first);
  CHECK_EQUAL(nearest_ancestor({grandchild, first}), first);
  CHECK_EQUAL(nearest_ancestor({first, grandchild}), first);
  CHECK_EQUAL(nearest_ancestor({grandchild, second}), self);
  CHECK_EQUAL(nearest_ancestor({first, second, grandchild}), self);
  CHECK_EQUAL(nearest_ancestor({second, self}), self);
  CHECK_EQUAL(nearest_ancestor({1}), 0);
  CHECK_EQUAL(nearest_ancestor({first, 1}), 0);
  CHECK_EQUAL(nearest_ancestor({}), 0);
}

void a_process_that_ended_does_not_count(const Family& family) {
  pid_t gone;
  {
    const Child child([] {});
    gone = child.pid();
    CHECK(comes_true([&] { return has_ended(gone); }));
  }
  CHECK(has_ended(gone) && !has_ended(getpid()) && !has_ended(1));
  CHECK_EQUAL(nearest_ancestor({gone}), 0);
  CHECK_EQUAL(nearest_ancestor({gone, family.first.pid()}), family.first.pid());
}

void who_is_named_follows_the_groups_that_are_there(const Family& family, pid_t grandchild) {
  const pid_t self = getpid(), first = family.first.pid(), second = family.second.pid();
  std::vector<pid_t> named;
  Readers readers([&](pid_t reader) { named.push_back(reader); });
  const auto one = readers.add({grandchild});
  const auto same = readers.add({grandchild});
  const auto above = readers.add({first});
  const auto all = readers.add({first, second});
  CHECK(named == (std::vector<pid_t>{grandchild, first, self}));
  const auto impossible = readers.add({second, 1});  // only PID 1 is an ancestor of both: no change
  CHECK_EQUAL(named.size(), 3u);
  readers.remove(all);
  readers.remove(one);
  readers.remove(above);
  CHECK(named == (std::vector<pid_t>{grandchild, first, self, first, grandchild}));
  readers.remove(same);  // no reader is needed any more
  CHECK_EQUAL(named.back(), 0);
  readers.remove(impossible);
  CHECK_EQUAL(named.size(), 6u);
  readers.remove(readers.add({}));
  CHECK_EQUAL(named.size(), 6u);
}

}  // namespace

int main() {
  Family family;
  const pid_t grandchild = family.grandchild->load();
  the_nearest_ancestor_is_named_but_never_pid_1(family, grandchild);
  a_process_that_ended_does_not_count(family);
  who_is_named_follows_the_groups_that_are_there(family, grandchild);
  kill(grandchild, SIGKILL);
  return report();
}
