// Guarantees between mailboxes: messages of a rank that left arrive, unasked messages have room, and posting threads do
// not wait for reading ones.
#include <algorithm>
#include <cstring>

#include "tests/check.h"
#include "tests/mailboxes.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

// No receive has asked for the messages when their sender leaves, which then uses its memory for other things.
void what_was_sent_is_delivered_though_its_sender_left(Way way) {
  constexpr size_t sizes[] = {0, 8, 5000, 60'000, 65'536, 100'000, 1'000'000};
  Mailboxes mailboxes(3, way);
  const auto each = [&](const auto& work) {
    for (int number = 0; number < 21; ++number) work(number % 2, number, sizes[number % 7]);
  };
  std::vector<std::shared_ptr<Message>> sent;
  std::vector<Bytes> data;
  each([&](int, int number, size_t bytes) { data.push_back(content(0, 1, number, bytes)); });
  each([&](int tag, int number, size_t bytes) {
    sent.push_back(mailboxes[0].send(1, tag, data[static_cast<size_t>(number)].data(), bytes));
  });
  Bytes later = content(0, 2, 0, 70'000), for_later(later.size());
  const auto early = mailboxes[2].receive(0, 0, for_later.data(), for_later.size());
  const auto last = mailboxes[0].send(2, 0, later.data(), later.size());
  mailboxes.leave(0);
  // Messages that fit into the link are complete, and within a host the large ones too.
  const auto is_complete = [&](int number) { return !sent[static_cast<size_t>(number)]->failure; };
  for (Bytes& bytes : data) std::fill(bytes.begin(), bytes.end(), uint8_t{7});
  std::vector<void*> reused;
  each([&](int, int, size_t bytes) {
    reused.push_back(mailboxes.shared_buffers().allocate(bytes));
    std::memset(reused.back(), 7, bytes);
  });
  int delivered = 0;
  each([&](int tag, int number, size_t bytes) {
    Bytes received(bytes);
    const auto message = mailboxes[1].receive(number % 3 == 0 ? -1 : 0, tag, received.data(), bytes);
    try {
      wait(mailboxes[1], *message);
      CHECK(received == content(0, 1, number, bytes));
      ++delivered;
    } catch (const Failure& failure) {
      CHECK_EQUAL(failure.code, Code::peer_lost);
      CHECK(!is_complete(number));
    }
  });
  CHECK(delivered >= (way == Way::network ? 4 : 12));
  wait(mailboxes[2], *early);
  CHECK(!last->failure || way == Way::network);
  for (void* buffer : reused) mailboxes.shared_buffers().release(buffer);
}

// A thread waits when the last frames of the leaving rank come, and its wait ends before their requests are done.
void who_leaves_is_heard_by_those_who_wait_for_something_else(Way way) {
  Mailboxes mailboxes(2, way);
  Bytes data = content(0, 1, 0, 1'000'000), received(data.size());
  char byte = 'x', got = 0;
  mailboxes[0].send(1, 0, data.data(), data.size());
  mailboxes[0].send(1, 1, &byte, 1);
  std::thread leaver([&] { mailboxes.leave(0, 60, false); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = Deadline::now();
  wait(mailboxes[1], *mailboxes[1].receive(0, 1, &got, 1));
  leaver.join();
  CHECK(Deadline::now() - before < 30);
  wait(mailboxes[1], *mailboxes[1].receive(0, 0, received.data(), received.size()));
  CHECK(received == data);
}

// The leaving rank's own memory may hold other data by the time it is read.
void what_was_not_complete_is_void_when_its_sender_left(Way way) {
  Mailboxes mailboxes(2, way);
  Bytes large = content(0, 1, 0, 3'000'000), received(large.size()), again(large.size()), small(10), first(10);
  const auto sent = mailboxes[0].send(1, 0, large.data(), large.size());
  const auto behind = mailboxes[0].send(1, 0, small.data(), small.size());
  mailboxes.leave(0);
  CHECK(sent->failure);
  std::fill(large.begin(), large.end(), uint8_t{7});
  CHECK_THROWS(wait(mailboxes[1], *mailboxes[1].receive(0, 0, received.data(), received.size())), Code::peer_lost);
  if (!behind->failure) return;  // otherwise: it is not taken for the one before it
  CHECK(received == Bytes(received.size()));
}

// A stopped peer does not listen: the wait for it ends at the deadline, and memory that it may still read is not used
// for anything else.
void what_nobody_took_in_time_is_never_used_again(Way way) {
  Mailboxes mailboxes(2, way);
  Bytes data = content(0, 1, 0, 100'000), received(data.size());
  CHECK(mailboxes[0].send(1, 0, data.data(), data.size())->done);
  const auto asked = mailboxes[1].receive(0, 1, received.data(), 1);  // the offer's header is here
  const Deadline deadline = Deadline::after(0.05);
  while (!deadline.has_passed()) std::this_thread::yield();
  mailboxes.raise(1, Code::aborted);  // from now on it does not listen
  CHECK_THROWS(wait(mailboxes[1], *asked), Code::aborted);
  mailboxes.leave(0, 0.05, false);
  std::vector<void*> buffers;
  for (int turn = 0; turn < 4; ++turn) {
    buffers.push_back(mailboxes.shared_buffers().allocate(1 << 17));
    uint8_t sum = 0;
    for (int at = 0; at < 1 << 17; ++at) sum |= static_cast<uint8_t*>(buffers.back())[at];
    CHECK_EQUAL(sum, 0);  // new pages
  }
  for (void* buffer : buffers) mailboxes.shared_buffers().release(buffer);
}

// Each sender waits in its own thread, which is what leaving ranks do to each other.
void all_may_leave_at_once(Way way) {
  Mailboxes mailboxes(4, way);
  Bytes data(100'000);
  run_ranks(4, [&](int rank) {
    for (int peer = 0; peer < 4; ++peer) {
      if (peer == rank) continue;
      for (const size_t bytes : {size_t{100}, data.size()}) mailboxes[rank].send(peer, 0, data.data(), bytes);
    }
  });
  std::atomic<int> left{0};
  run_ranks(4, [&](int rank) {
    mailboxes[rank].close([&] { return mailboxes.end(rank); });
    for (int peer = 0; peer < 4; ++peer) {
      if (peer != rank) mailboxes[peer].note_leaving(rank);
    }
    mailboxes[rank].hand_over(Deadline::after(60));
    ++left;
    while (left < 4) std::this_thread::yield();  // no rank ends before: each has been answered
  });
}

// The end of a link alone is no failure: the peer may have left, which the Watch reports, perhaps later.
void a_link_that_ends_harms_others_only_if_nobody_says_that_its_peer_left() {
  for (const bool has_left : {true, false}) {
    Mailboxes mailboxes(3, Way::network);
    char byte = 'x', received = 0;
    const auto for_ever = mailboxes[0].receive(2, 0, &received, 1);
    mailboxes.end_link(0, 2);
    const auto exchange = [&] {
      wait(mailboxes[1], *mailboxes[1].send(0, 1, &byte, 1));
      wait(mailboxes[0], *mailboxes[0].receive(1, 1, &received, 1));
    };
    exchange();
    if (has_left) mailboxes[0].note_gone(2);
    CHECK_EQUAL(mailboxes[0].wait_until(*for_ever, patience, Deadline::after(1.2)), !has_left);
    if (has_left) {
      exchange();
    } else {
      CHECK_THROWS(wait(mailboxes[0], *for_ever), Code::peer_lost);
    }
  }
}

// Unasked messages do not fill the receiver's memory, and do not delay the message for which it waits.
void unasked_messages_wait_with_their_sender(Way way) {
  constexpr int count = 200;
  constexpr size_t bytes = 50'000;
  Mailboxes mailboxes(2, way);
  std::vector<Bytes> data;
  std::vector<std::shared_ptr<Message>> sent;
  for (int number = 0; number < count; ++number) {
    data.push_back(content(0, 1, number, bytes));
    sent.push_back(mailboxes[0].send(1, 5, data.back().data(), bytes));
  }
  char byte = 'x', received = 0;
  const auto wanted = mailboxes[0].send(1, 9, &byte, 1);
  wait(mailboxes[1], *mailboxes[1].receive(0, 9, &received, 1));
  CHECK_EQUAL(received, 'x');
  wait(mailboxes[0], *wanted);
  const auto is_done = [](const auto& message) { return message->done.load(); };
  const auto complete = static_cast<size_t>(std::count_if(sent.begin(), sent.end(), is_done));
  CHECK(complete * bytes <= Correspondent::all_credit);
  CHECK(complete * bytes > Correspondent::all_credit / 2);
  std::vector<Bytes> got(count, Bytes(bytes));
  std::vector<std::shared_ptr<Message>> asked;
  for (Bytes& each : got) asked.push_back(mailboxes[1].receive(0, 5, each.data(), bytes));
  for (const auto& message : asked) wait(mailboxes[1], *message);
  CHECK(got == data);
  for (const auto& message : sent) wait(mailboxes[0], *message);
  // Credit has come back: unasked messages are complete again.
  const Deadline deadline = Deadline::after(60);
  while (!mailboxes[0].send(1, 5, data[0].data(), bytes)->done && !deadline.has_passed()) std::this_thread::yield();
  CHECK(!deadline.has_passed());
}

// While a thread reads a large message, other threads post and receive messages.
void who_posts_does_not_wait_for_who_reads() {
  Mailboxes mailboxes(3, Way::read);
  Bytes large = content(0, 1, 0, 3'000'000), received(large.size());
  char byte = 'x', other = 0, third = 0;
  const auto sent = mailboxes[0].send(1, 0, large.data(), large.size());
  std::atomic<bool> is_reading{false}, may_read{false};
  mailboxes.before_reading([&] {
    is_reading = true;
    const Deadline deadline = Deadline::after(20);
    while (!may_read && !deadline.has_passed()) std::this_thread::yield();
    CHECK(may_read);
  });
  const auto message = mailboxes[1].receive(0, 0, received.data(), received.size());  // neither does it read by itself
  std::thread waiter([&] { wait(mailboxes[1], *message); });
  while (!is_reading) std::this_thread::yield();
  mailboxes[1].send(2, 1, &byte, 1);
  wait(mailboxes[2], *mailboxes[2].receive(1, 1, &other, 1));
  mailboxes[0].send(1, 1, &byte, 1);
  wait(mailboxes[1], *mailboxes[1].receive(0, 1, &third, 1));
  CHECK_EQUAL(third, 'x');
  CHECK(!message->done);
  may_read = true;
  waiter.join();
  CHECK(received == large);
  wait(mailboxes[0], *sent);
}

// It fails only after the reading thread has stopped: then its owner may free the memory.
void a_message_that_is_read_fails_when_nobody_writes_to_it_any_more() {
  Mailboxes mailboxes(2, Way::read);
  Bytes large = content(0, 1, 0, 10'000'000), received(large.size());
  const auto sent = mailboxes[0].send(1, 0, large.data(), large.size());
  std::atomic<bool> is_reading{false}, may_read{false};
  mailboxes.before_reading([&] {
    is_reading = true;
    while (!may_read) std::this_thread::yield();
  });
  const auto message = mailboxes[1].receive(0, 0, received.data(), received.size());
  std::thread reader([&] { CHECK_THROWS(wait(mailboxes[1], *message), Code::timeout); });
  while (!is_reading) std::this_thread::yield();
  char byte = 0;
  CHECK_THROWS(wait(mailboxes[1], *mailboxes[1].receive(0, 1, &byte, 1), 0.01), Code::timeout);
  CHECK(!message->done);
  may_read = true;
  reader.join();
}

}  // namespace

int main() {
  for (const Way way : {Way::read, Way::ring, Way::network}) {
    what_was_sent_is_delivered_though_its_sender_left(way);
    if (way != Way::network) who_leaves_is_heard_by_those_who_wait_for_something_else(way);
    what_was_not_complete_is_void_when_its_sender_left(way);
    if (way != Way::network) what_nobody_took_in_time_is_never_used_again(way);
    all_may_leave_at_once(way);
    unasked_messages_wait_with_their_sender(way);
  }
  a_link_that_ends_harms_others_only_if_nobody_says_that_its_peer_left();
  who_posts_does_not_wait_for_who_reads();
  a_message_that_is_read_fails_when_nobody_writes_to_it_any_more();
  return report();
}
