// Messages between mailboxes: matching, completion and failures.
#include <algorithm>
#include <chrono>
#include <random>

#include "tests/check.h"
#include "tests/mailboxes.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

struct Transfer {
  int from, to, tag;
  size_t bytes;
};

// Every rank posts in its own order; with tags, because messages of one tag arrive in order.
void messages_find_their_receivers(int size, Way way, unsigned seed) {
  constexpr size_t sizes[] = {0, 1, 100, 4095, 60'000, 65'535, 65'536, 200'000, 1'000'000};
  std::mt19937 random(seed);
  std::vector<Transfer> transfers;
  for (int number = 0; number < 60; ++number) {
    const int from = static_cast<int>(random() % static_cast<unsigned>(size));
    const int to = (from + 1 + static_cast<int>(random() % static_cast<unsigned>(size - 1))) % size;
    transfers.push_back({from, to, static_cast<int>(random() % 3), sizes[random() % std::size(sizes)]});
  }
  transfers.push_back({0, 1, 5, 10'000'000});
  transfers.push_back({1, 0, 5, 10'000'000});  // both directions at once
  Mailboxes mailboxes(size, way);
  SharedBuffers& shared_buffers = mailboxes.shared_buffers();
  run_ranks(size, [&](int rank) {
    std::mt19937 own(seed + 1000 + static_cast<unsigned>(rank));
    Mailbox& mailbox = mailboxes[rank];
    struct Posted {
      std::shared_ptr<Message> message;
      Bytes data, wanted;
      void* shared = nullptr;  // where it is sent from, if not from `data`
    };
    std::vector<std::unique_ptr<Posted>> posted;
    // Sends and receives are each in order, and mixed at random.
    const auto count = static_cast<int>(transfers.size());
    int next_send = 0, next_receive = 0;
    while (next_send < count || next_receive < count) {
      const bool sends = next_receive == count || (next_send < count && own() % 2 == 0);
      const int number = sends ? next_send++ : next_receive++;
      const auto [from, to, tag, bytes] = transfers[static_cast<size_t>(number)];
      if (rank != (sends ? from : to)) continue;
      auto entry = std::make_unique<Posted>();
      entry->wanted = content(from, to, number, bytes);
      if (sends) {
        entry->data = entry->wanted;
        if (own() % 2 == 0) {
          entry->shared = shared_buffers.allocate(bytes);
          std::copy(entry->wanted.begin(), entry->wanted.end(), static_cast<uint8_t*>(entry->shared));
        }
        const void* data = entry->shared != nullptr ? entry->shared : entry->data.data();
        entry->message = mailbox.send(to, tag, data, bytes);
      } else {
        entry->data.assign(bytes, 0xee);
        entry->message = mailbox.receive(from, tag, entry->data.data(), bytes);
      }
      posted.push_back(std::move(entry));
      if (own() % 4 == 0) std::this_thread::yield();
    }
    std::shuffle(posted.begin(), posted.end(), own);
    for (const auto& entry : posted) {
      wait(mailbox, *entry->message);
      CHECK(entry->data == entry->wanted);
      if (entry->shared != nullptr) shared_buffers.release(entry->shared);
    }
  });
}

// On a host, messages without a receive are copied up to a limit, and their memory may be written again.
void what_is_copied_is_done_at_once(Way way) {
  constexpr int count = 40;
  Mailboxes mailboxes(2, way);
  std::vector<std::shared_ptr<Message>> sent;
  std::vector<Bytes> data(count);
  int done = 0;
  for (int number = 0; number < count; ++number) {
    Bytes& bytes = data[static_cast<size_t>(number)];
    bytes = content(0, 1, number, 1 << 20);
    sent.push_back(mailboxes[0].send(1, 0, bytes.data(), bytes.size()));
    if (!sent.back()->done) continue;
    std::fill(bytes.begin(), bytes.end(), uint8_t{0});
    ++done;
  }
  CHECK_EQUAL(done, 32);
  for (int number = 0; number < count; ++number) {
    Bytes received(1 << 20);
    wait(mailboxes[1], *mailboxes[1].receive(0, 0, received.data(), received.size()));
    CHECK(received == content(0, 1, number, 1 << 20));
  }
  for (const auto& message : sent) wait(mailboxes[0], *message);
  // Once they were taken there is room again.
  Bytes again(1 << 20);
  const Deadline deadline = Deadline::after(60);
  while (!mailboxes[0].send(1, 1, again.data(), again.size())->done && !deadline.has_passed()) std::this_thread::yield();
  CHECK(!deadline.has_passed());
}

void anyone_may_be_received_from(Way way) {
  constexpr int size = 4, rounds = 50;
  Mailboxes mailboxes(size, way);
  run_ranks(size, [&](int rank) {
    for (int round = 0; round < rounds; ++round) {
      const size_t bytes = round % 5 == 0 ? 100'000 : 64;
      if (rank > 0) {
        Bytes data = content(rank, 0, round, bytes);
        wait(mailboxes[rank], *mailboxes[rank].send(0, round, data.data(), bytes));
        continue;
      }
      std::vector<bool> came(size);
      for (int sender = 1; sender < size; ++sender) {
        Bytes data(bytes);
        const auto message = mailboxes[0].receive(-1, round, data.data(), bytes);
        wait(mailboxes[0], *message);
        CHECK(!came[static_cast<size_t>(message->sender)]);
        came[static_cast<size_t>(message->sender)] = true;
        CHECK(data == content(message->sender, 0, round, bytes));
      }
    }
  });
}

// Posted in a thread and never waited for there; the mailbox's own thread does the work.
void messages_move_while_nobody_waits(Way way) {
  Mailboxes mailboxes(2, way);
  Bytes sent = content(0, 1, 0, 3'000'000), received(sent.size());
  const auto send = mailboxes[0].send(1, 0, sent.data(), sent.size());
  const auto receive = mailboxes[1].receive(0, 0, received.data(), received.size());
  const Deadline deadline = Deadline::after(60);
  while (!(send->done && receive->done) && !deadline.has_passed()) std::this_thread::yield();
  CHECK(send->done && receive->done);
  CHECK(received == sent);
}

// A message that was posted during the wait of another thread goes on after that wait.
void what_is_posted_under_a_waiter_goes_on_after_it(Way way) {
  Mailboxes mailboxes(2, way);
  char first = 1, got = 0;
  const auto awaited = mailboxes[0].receive(1, 1, &got, 1);
  std::thread waiter([&] { wait(mailboxes[0], *awaited); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Bytes sent = content(0, 1, 0, 3'000'000), received(sent.size());
  const auto send = mailboxes[0].send(1, 0, sent.data(), sent.size());
  wait(mailboxes[1], *mailboxes[1].send(0, 1, &first, 1));
  waiter.join();
  wait(mailboxes[1], *mailboxes[1].receive(0, 0, received.data(), received.size()));
  const Deadline deadline = Deadline::after(60);
  while (!send->done && !deadline.has_passed()) std::this_thread::yield();
  CHECK(send->done);
  CHECK(received == sent);
}

void a_message_of_another_size_fails_its_receive_and_no_other(Way way) {
  for (const bool is_early : {true, false}) {
    Mailboxes mailboxes(2, way);
    Bytes sent = content(0, 1, 0, 100'000), received(sent.size());
    std::shared_ptr<Message> wrong, right;
    const auto post = [&] {
      wrong = mailboxes[1].receive(0, 0, received.data(), 10);
      right = mailboxes[1].receive(0, 0, received.data(), received.size());
    };
    if (!is_early) post();
    const auto first = mailboxes[0].send(1, 0, sent.data(), sent.size());
    const auto second = mailboxes[0].send(1, 0, sent.data(), sent.size());
    if (is_early) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      post();
    }
    CHECK_THROWS(wait(mailboxes[1], *wrong), Code::mismatch);
    wait(mailboxes[1], *right);
    CHECK(received == sent);
    wait(mailboxes[0], *first);
    wait(mailboxes[0], *second);
  }
}

void time_runs_out_for_a_message_that_does_not_come(Way way) {
  Mailboxes mailboxes(2, way);
  char byte = 0, other = 0;
  const auto later = mailboxes[0].receive(1, 2, &other, 1);
  CHECK_THROWS(wait(mailboxes[0], *mailboxes[0].receive(1, 1, &byte, 1), 0.02), Code::timeout);
  // It ended everything: data that arrives now is not written to the old place.
  CHECK_THROWS(wait(mailboxes[0], *later), Code::timeout);
  const char sent = 'x';
  mailboxes[1].send(0, 2, &sent, 1);
  CHECK_THROWS(mailboxes[0].receive(1, 2, &other, 1), Code::timeout);
  CHECK_EQUAL(other, 0);
}

void an_alarm_frees_everybody_who_waits(Way way) {
  Bytes data(3'000'000);
  Mailboxes mailboxes(2, way);
  std::vector<std::shared_ptr<Message>> messages{mailboxes[0].send(1, 0, data.data(), data.size()),
                                                 mailboxes[0].receive(1, 1, data.data(), 10),
                                                 mailboxes[0].receive(-1, 2, data.data(), 10)};
  std::vector<std::thread> waiters;
  for (const auto& message : messages) {
    waiters.emplace_back([&] { CHECK_THROWS(wait(mailboxes[0], *message), Code::aborted); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  mailboxes.raise(0, Code::aborted);
  for (std::thread& waiter : waiters) waiter.join();
  char byte = 0;
  CHECK_THROWS(mailboxes[0].send(1, 0, &byte, 1), Code::aborted);
}

// As for a rank that sends a last message and ends.
void what_came_before_an_alarm_is_received(Way way) {
  Mailboxes mailboxes(2, way);
  const char sent = 'x';
  char received = 0;
  CHECK(mailboxes[1].send(0, 3, &sent, 1)->done);
  mailboxes.raise(0, Code::peer_lost);
  const auto message = mailboxes[0].receive(1, 3, &received, 1);
  wait(mailboxes[0], *message);
  CHECK_EQUAL(received, 'x');
  CHECK_THROWS(mailboxes[0].receive(1, 3, &received, 1), Code::peer_lost);
}

// As when a group is closed: the alarm is raised, then the mailbox goes.
void it_can_be_destroyed_with_messages_under_way(Way way) {
  Bytes data(3'000'000), early(100);
  std::shared_ptr<Message> send, receive;
  {
    Mailboxes mailboxes(2, way);
    send = mailboxes[0].send(1, 0, data.data(), data.size());
    receive = mailboxes[0].receive(1, 0, data.data(), data.size());
    mailboxes[0].send(1, 1, early.data(), early.size());
    mailboxes[1].receive(0, 2, data.data(), data.size());
    mailboxes.raise(0, Code::aborted);
    mailboxes.raise(1, Code::aborted);
  }
  CHECK(!receive->done || receive->failure);
}

}  // namespace

int main() {
  for (const Way way : {Way::read, Way::ring, Way::network}) {
    for (const int size : {2, 3, 4}) messages_find_their_receivers(size, way, static_cast<unsigned>(size));
    anyone_may_be_received_from(way);
    if (way != Way::network) what_is_copied_is_done_at_once(way);
    messages_move_while_nobody_waits(way);
    what_is_posted_under_a_waiter_goes_on_after_it(way);
    a_message_of_another_size_fails_its_receive_and_no_other(way);
    time_runs_out_for_a_message_that_does_not_come(way);
    an_alarm_frees_everybody_who_waits(way);
    what_came_before_an_alarm_is_received(way);
    it_can_be_destroyed_with_messages_under_way(way);
  }
  return report();
}
