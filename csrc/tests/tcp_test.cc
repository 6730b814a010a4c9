// The network between hosts: bytes arrive whole and in order, only members get in, and nothing stays open.
#include <sys/socket.h>

#include <random>

#include "tests/check.h"
#include "tests/network_ranks.h"
#include "transport/tcp_socket.h"

namespace {

using namespace shoal;
using namespace shoal::testing;

std::string random_bytes(size_t size, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

// ---- links

void bytes_arrive_whole_and_in_order_both_ways() {
  const size_t stripe = TcpLink::stripe_bytes;
  std::vector<size_t> sizes{1, 7, 4096, stripe - 1, stripe, stripe + 1, 3, 8 * stripe + 5, 20 * stripe - 100};
  for (int streams : {1, 2, 3, 4}) {
    Ranks ranks = form(2, {.streams = streams});
    on_every_rank(ranks, [&](NetworkRank& self) {
      const int peer = 1 - self.rank;
      auto& link = dynamic_cast<TcpLink&>(self.network.channel(0).to(peer, Deadline::after(20)));
      uint64_t total = 0;
      for (size_t i = 0; i < sizes.size(); ++i) {
        const auto seed = static_cast<unsigned>(2 * i);
        std::string incoming(sizes[i], '\0');
        exchange(link, random_bytes(sizes[i], seed + static_cast<unsigned>(self.rank)), incoming, self.alarm);
        CHECK(incoming == random_bytes(sizes[i], seed + static_cast<unsigned>(peer)));
        total += sizes[i];
      }
      CHECK_EQUAL(link.bytes_sent(), total);
      CHECK_EQUAL(link.bytes_received(), total);
    });
  }
}

void one_side_may_use_a_link_that_the_other_has_not_asked_for() {
  for (int eager : {0, 1}) {  // the one that accepts, and the one that dials
    Ranks ranks = form(2, {.streams = 2});
    Links& links = ranks[static_cast<size_t>(eager)]->network.channel(1);
    Links& other = ranks[static_cast<size_t>(1 - eager)]->network.channel(1);
    CHECK(other.find(eager) == nullptr);
    std::string nothing;
    exchange(links.to(1 - eager, Deadline::after(20)), "hello", nothing, ranks[0]->alarm);
    CHECK(comes_true([&] { return other.find(eager) != nullptr; }));
    std::string incoming(5, '\0');
    exchange(*other.find(eager), "", incoming, ranks[0]->alarm);
    CHECK_EQUAL(incoming, "hello");
  }
}

void a_request_makes_the_link_without_waiting() {
  Ranks ranks = form(2, {.streams = 2});
  for (int asks : {0, 1}) {
    Links& links = ranks[static_cast<size_t>(asks)]->network.channel(asks);
    Links& other = ranks[static_cast<size_t>(1 - asks)]->network.channel(asks);
    CHECK(links.find(1 - asks) == nullptr);
    for (int time = 0; time < 3; ++time) links.request(1 - asks);
    CHECK(comes_true([&] { return links.find(1 - asks) != nullptr && other.find(asks) != nullptr; }));
  }
  for (auto& rank : ranks) CHECK_EQUAL(rank->hub.refused(), 0);
}

void channels_and_peers_are_apart() {
  Ranks ranks = form(4, {.streams = 2});
  on_every_rank(ranks, [&](NetworkRank& self) {
    for (int step = 1; step < 4; ++step) {
      for (int channel : {1, 0}) {
        const int to = self.rank ^ step;
        const std::string name = std::to_string(channel) + std::to_string(self.rank) + std::to_string(to);
        std::string incoming(3, '\0');
        exchange(self.network.channel(channel).to(to, Deadline::after(20)), name, incoming, self.alarm);
        CHECK_EQUAL(incoming, std::to_string(channel) + std::to_string(to) + std::to_string(self.rank));
      }
    }
  });
  for (auto& rank : ranks) CHECK_EQUAL(rank->hub.refused(), 0);
}

void ranks_meet_over_ipv6() {
  try {
    listen_on("::1");
  } catch (const Failure&) {
    std::printf("no IPv6 here: not tried\n");
    return;
  }
  Ranks ranks = form(2, {.address = "::1"});
  CHECK(ranks[0]->network.endpoint().address.starts_with("[::1]:"));
  CHECK(!ranks[0]->alarm.is_raised());
}

// ---- what ends

void a_link_to_a_rank_that_left_names_it() {
  Ranks ranks = form(2);
  std::thread peer([&] { ranks[1]->network.channel(0).to(0, Deadline::after(20)); });
  Link& link = ranks[0]->network.channel(0).to(1, Deadline::after(20));
  peer.join();
  ranks[1].reset();
  std::string incoming(1, '\0'), outgoing;
  try {
    exchange(link, outgoing, incoming, ranks[0]->alarm);
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK_EQUAL(failure.code, Code::peer_lost);
    CHECK_EQUAL(failure.rank, 1);
  }
  CHECK_EQUAL(raised(ranks[0]->alarm).code, Code::ok);  // it had said goodbye
}

void an_alarm_frees_who_polls_a_link_and_who_waits_for_one() {
  Ranks ranks = form(3);
  std::thread aborts([&] {
    sleep_for(0.05);
    ranks[2]->watch.tell(Code::aborted, 2, "rank 2 aborted the group");
  });
  // A rank may see the other's closed links before the reason from rank 2: a Group waits for the reason.
  const auto is_freed = [&](int rank, int other) {
    std::string incoming(1, '\0');
    Link& link = ranks[static_cast<size_t>(rank)]->network.channel(0).to(other, Deadline::after(20));
    try {
      exchange(link, "", incoming, ranks[static_cast<size_t>(rank)]->alarm);
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.code == Code::aborted || failure.code == Code::peer_lost);
    }
  };
  std::vector<std::thread> waiters;
  waiters.emplace_back(is_freed, 0, 1);
  waiters.emplace_back(is_freed, 1, 0);
  aborts.join();
  for (std::thread& waiter : waiters) waiter.join();
  for (int look = 0; look < 1000 && !(ranks[0]->alarm.is_raised() && ranks[1]->alarm.is_raised()); ++look) {
    sleep_for(0.001);
  }
  for (auto& rank : ranks) {
    CHECK_EQUAL(raised(rank->alarm).rank, 2);
    CHECK(std::string(raised(rank->alarm).what()).ends_with("rank 2 aborted the group"));
  }
  CHECK_THROWS(ranks[0]->network.channel(1).to(2, Deadline::after(20)), Code::aborted);
}

void nothing_stays_open() {
  form(3, {.streams = 2});  // what the first use in a process opens for good
  const int before = open_descriptors();
  for (int round = 0; round < 100; ++round) {
    Ranks ranks = form(2, {.streams = 2});
    on_every_rank(ranks, [&](NetworkRank& self) {
      std::string incoming(1, '\0');
      exchange(self.network.channel(0).to(1 - self.rank, Deadline::after(20)), "x", incoming, self.alarm);
    });
    if (round % 2 == 1) ranks[0]->watch.tell(Code::aborted, 0, "rank 0 aborted the group");
  }
  CHECK_EQUAL(open_descriptors(), before);
}

// ---- admission

void a_rank_that_does_not_come_is_named() {
  Ranks ranks = make_ranks(3);
  const std::vector<Endpoint> endpoints = endpoints_of(ranks);
  std::thread other([&] { CHECK_THROWS(ranks[2]->start(endpoints, secret_of(7), 0.3), Code::timeout); });
  try {
    ranks[0]->start(endpoints, secret_of(7), 0.3);  // rank 1 listens, and never starts
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK_EQUAL(failure.code, Code::timeout);
    CHECK_EQUAL(failure.rank, 1);
  }
  other.join();
}

// The names of the processes decide which of the two dials, and so is refused.
void a_rank_with_another_secret_is_refused() {
  Ranks ranks = make_ranks(2, {.handshake_limit = 0.1});
  const std::vector<Endpoint> endpoints = endpoints_of(ranks);
  std::atomic<int> refused{0}, timed_out{0};
  on_every_rank(ranks, [&](NetworkRank& rank) {
    try {
      rank.start(endpoints, secret_of(static_cast<uint8_t>(7 + rank.rank)), 0.5);
    } catch (const Failure& failure) {
      (failure.code == Code::refused ? refused : timed_out) += 1;
    }
  });
  CHECK_EQUAL(refused.load(), 1);
  CHECK_EQUAL(timed_out.load(), 1);
  CHECK(ranks[0]->hub.refused() + ranks[1]->hub.refused() > 0);
  for (auto& rank : ranks) CHECK(!rank->alarm.is_raised());
}

Descriptor connect_to(const std::string& address) {
  Descriptor socket = begin_to_connect(address);
  pollfd polled{socket.number(), POLLOUT, 0};
  poll(&polled, 1, 5000);
  return socket;
}

void send_text(const Descriptor& socket, const std::string& text) {
  CHECK_EQUAL(send(socket.number(), text.data(), text.size(), MSG_NOSIGNAL), text.size());
}

// Reads until the other end closes; false if it does not within five seconds.
bool is_closed(const Descriptor& socket) {
  char buffer[256];
  for (;;) {
    pollfd polled{socket.number(), POLLIN, 0};
    if (poll(&polled, 1, 5000) <= 0) return false;
    if (recv(socket.number(), buffer, sizeof buffer, MSG_DONTWAIT) <= 0) return true;
  }
}

Handshake::Progress call(const Descriptor& socket, Handshake handshake) {
  for (;;) {
    pollfd polled{socket.number(), POLLIN, 0};
    if (poll(&polled, 1, 5000) <= 0) return Handshake::Progress::underway;
    const Handshake::Progress progress = handshake.converse(socket.number()).progress;
    if (progress != Handshake::Progress::underway) return progress;
  }
}

void strangers_are_refused_and_the_group_still_forms() {
  Ranks ranks = make_ranks(2, {.handshake_limit = 0.3});
  const std::vector<Endpoint> endpoints = endpoints_of(ranks);
  // All of them connect before the member.
  const Descriptor silent = connect_to(endpoints[0].address);
  const Descriptor web = connect_to(endpoints[0].address);
  send_text(web, "GET / HTTP/1.1\r\nHost: shoal\r\n\r\n");
  const Descriptor noisy = connect_to(endpoints[0].address);
  send_text(noisy, random_bytes(100000, 1));
  const Descriptor right_size = connect_to(endpoints[0].address);
  send_text(right_size, random_bytes(96, 2));
  const Descriptor wrong_secret = connect_to(endpoints[0].address);
  std::thread caller([&] {
    CHECK_EQUAL(call(wrong_secret, Handshake::dial(secret_of(8), {number_of(secret_of(7)), 1, 0, 0, 0})), Handshake::Progress::closed);
  });
  connect_to(endpoints[0].address);  // and gone

  on_every_rank(ranks, [&](NetworkRank& rank) { rank.start(endpoints, secret_of(7)); });
  caller.join();
  for (const Descriptor* stranger : {&silent, &web, &noisy, &right_size}) CHECK(is_closed(*stranger));
  // More, if a member took too long and tried again.
  CHECK(comes_true([&] { return ranks[0]->hub.refused() >= 6; }));
  for (auto& rank : ranks) CHECK(!rank->alarm.is_raised());
}

void a_proof_is_worth_nothing_elsewhere() {
  // A stranger redirects a member, which wants to connect to rank 0, to rank 1.
  Ranks ranks = make_ranks(3);
  const std::vector<Endpoint> endpoints = endpoints_of(ranks);
  on_every_rank(ranks, [&](NetworkRank& rank) { rank.start(endpoints, secret_of(7)); });
  const Descriptor misled = connect_to(endpoints[1].address);
  CHECK_EQUAL(call(misled, Handshake::dial(secret_of(7), {number_of(secret_of(7)), 2, 0, 0, 0})), Handshake::Progress::closed);
  CHECK_EQUAL(ranks[1]->hub.refused(), 1);

  // A replay of recorded messages.
  Descriptor first = connect_to(endpoints[0].address);
  char challenge[32], hello[96];
  CHECK(comes_true([&] { return recv(first.number(), challenge, 32, MSG_DONTWAIT) == 32; }));
  int pair[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const Descriptor here(pair[0]), there(pair[1]);
  Handshake dialer = Handshake::dial(secret_of(7), {number_of(secret_of(7)), 2, 0, 1, 0});
  CHECK_EQUAL(send(here.number(), challenge, 32, 0), 32);
  CHECK_EQUAL(dialer.converse(there.number()).progress, Handshake::Progress::underway);
  CHECK_EQUAL(recv(here.number(), hello, 96, 0), 96);
  send_text(first, std::string(hello, 96));
  char welcome[32];
  CHECK(comes_true([&] { return recv(first.number(), welcome, 32, MSG_DONTWAIT) == 32; }));
  const Descriptor again = connect_to(endpoints[0].address);
  send_text(again, std::string(hello, 96));
  CHECK(is_closed(again));
  CHECK_EQUAL(ranks[0]->hub.refused(), 1);
}

void strangers_do_not_use_up_the_descriptors() {
  Ranks ranks = make_ranks(2);
  const std::vector<Endpoint> endpoints = endpoints_of(ranks);
  const int before = open_descriptors();
  std::vector<Descriptor> strangers;
  for (int index = 0; index < 300; ++index) {
    strangers.push_back(connect_to(endpoints[static_cast<size_t>(index % 2)].address));
  }
  sleep_for(0.1);
  CHECK(open_descriptors() - before - 300 <= 2 * 128);  // most_guests of both listeners
  on_every_rank(ranks, [&](NetworkRank& rank) { rank.start(endpoints, secret_of(7)); });
  for (auto& rank : ranks) CHECK(!rank->alarm.is_raised());
}

// ---- several groups of the same processes

void groups_of_the_same_processes_share_their_connections() {
  const Hubs hubs = make_hubs(4);
  std::vector<Ranks> groups;
  std::vector<int> descriptors;
  for (uint8_t number = 0; number < 5; ++number) {
    groups.push_back(make_ranks_of(hubs));
    Ranks& ranks = groups.back();
    const std::vector<Endpoint> endpoints = endpoints_of(ranks);
    on_every_rank(ranks, [&](NetworkRank& rank) { rank.start(endpoints, secret_of(number)); });
    descriptors.push_back(open_descriptors());
  }
  for (const int count : descriptors) CHECK_EQUAL(count, descriptors.front());
  CHECK_EQUAL(endpoints_of(groups.front())[1].address, endpoints_of(groups.back())[1].address);
  groups[0].clear();  // only its own ranks notice it
  groups[1][2]->watch.tell(Code::aborted, 2, "rank 2 aborted the group");
  for (auto& rank : groups[1]) CHECK(comes_true([&] { return rank->alarm.is_raised(); }));
  for (size_t other = 2; other < groups.size(); ++other) {
    for (auto& rank : groups[other]) CHECK(!rank->alarm.is_raised());
  }
  on_every_rank(groups[2], [&](NetworkRank& self) {
    for (int step = 1; step < 4; ++step) {
      const int peer = self.rank ^ step;
      std::string incoming(1, '\0');
      Link& link = self.network.channel(1).to(peer, Deadline::after(20));
      exchange(link, std::string(1, static_cast<char>('0' + self.rank)), incoming, self.alarm);
      CHECK_EQUAL(incoming, std::string(1, static_cast<char>('0' + peer)));
    }
  });
}

// A process may close its last connection with a process that is just joining the next group.
void a_group_forms_while_the_one_before_is_left() {
  const Hubs hubs = make_hubs(2);
  constexpr int rounds = 60;
  std::vector<Ranks> groups;
  std::vector<std::thread> processes;
  for (int round = 0; round < rounds; ++round) groups.push_back(make_ranks_of(hubs));
  const std::vector<Endpoint> endpoints = endpoints_of(groups.front());
  for (size_t index = 0; index < hubs.size(); ++index) {
    processes.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      for (int round = 0; round < rounds; ++round) {
        auto& self = groups[static_cast<size_t>(round)][index];
        self->start(endpoints, secret_of(static_cast<uint8_t>(round)));
        CHECK(!self->alarm.is_raised());
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        self.reset();
      }
    });
  }
  for (std::thread& process : processes) process.join();
}

}  // namespace

int main() {
  bytes_arrive_whole_and_in_order_both_ways();
  one_side_may_use_a_link_that_the_other_has_not_asked_for();
  a_request_makes_the_link_without_waiting();
  channels_and_peers_are_apart();
  ranks_meet_over_ipv6();
  a_link_to_a_rank_that_left_names_it();
  an_alarm_frees_who_polls_a_link_and_who_waits_for_one();
  nothing_stays_open();
  a_rank_that_does_not_come_is_named();
  a_rank_with_another_secret_is_refused();
  strangers_are_refused_and_the_group_still_forms();
  a_proof_is_worth_nothing_elsewhere();
  strangers_do_not_use_up_the_descriptors();
  groups_of_the_same_processes_share_their_connections();
  a_group_forms_while_the_one_before_is_left();
  return report();
}
