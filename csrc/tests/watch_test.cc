// All ranks notice a rank that is gone, stopped or gave up, and name the same rank; a goodbye is no failure.
#include "transport/watch.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "tests/check.h"
#include "tests/network_ranks.h"

namespace {

using namespace shoal;
using namespace shoal::testing;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

[[noreturn]] void sleep_for_ever() {
  for (;;) pause();
}

// ---- ranks of one host

struct Host {
  Shown ranks[3];
  std::atomic<int> ready{0};
};

// The Watch of one of a host's ranks.
struct LocalRank {
  LocalRank(Shown& self, int rank, Watch::Limits limits = {})
      : watch(self.as(rank), waiting, limits, alarm, hub, [this] { calls.fetch_add(1); }) {}

  std::atomic<int> waiting{0};
  std::atomic<int> calls{0};
  Alarm alarm;
  Hub hub;
  Watch watch;
};

// A child that is rank 1, watches its parent as rank 0, and does `then` when it has begun.
std::function<void()> rank_1(SharedWithChildren<Host>& host, const std::function<void(LocalRank&)>& then) {
  return [&host, then, parent = getpid()] {
    LocalRank self(host->ranks[1], 1);
    self.watch.add_local(host->ranks[0].as(0, parent));
    host->ready = 1;
    then(self);
  };
}

void a_killed_neighbour_is_named_at_once() {
  for (int waiting : {0, 1}) {
    SharedWithChildren<Host> host;
    const Child child(rank_1(host, [](LocalRank&) { sleep_for_ever(); }));
    LocalRank self(host->ranks[0], 0);
    self.waiting = waiting;
    self.watch.add_local(host->ranks[1].as(1, child.pid()));
    CHECK(comes_true([&] { return host->ready == 1; }));
    const auto begin = Clock::now();
    child.signal(SIGKILL);
    CHECK(comes_true([&] { return self.alarm.is_raised(); }));
    std::printf("a killed process on this host was noticed after %.2f ms\n", milliseconds_since(begin));
    CHECK_EQUAL(raised(self.alarm).code, Code::peer_lost);
    CHECK_EQUAL(raised(self.alarm).rank, 1);
    CHECK(std::strstr(raised(self.alarm).what(), "rank 1 (process ") != nullptr);
    CHECK(comes_true([&] { return self.calls == 1; }));
  }
}

void a_stopped_neighbour_is_named_once_it_is_waited_for() {
  SharedWithChildren<Host> host;
  const Child child(rank_1(host, [](LocalRank&) { sleep_for_ever(); }));
  LocalRank self(host->ranks[0], 0, {.silence = 0.3});
  self.watch.add_local(host->ranks[1].as(1, child.pid()));
  CHECK(comes_true([&] { return host->ready == 1; }));
  child.signal(SIGSTOP);
  sleep_for(0.6);
  CHECK(!self.alarm.is_raised());
  const auto begin = Clock::now();
  self.waiting = 1;
  CHECK(comes_true([&] { return self.alarm.is_raised(); }));
  std::printf("a stopped process, limit 300 ms, was noticed after %.0f ms\n", milliseconds_since(begin));
  CHECK_EQUAL(raised(self.alarm).code, Code::peer_stopped);
  CHECK_EQUAL(raised(self.alarm).rank, 1);
}

void who_was_stopped_does_not_blame_the_others() {
  SharedWithChildren<Host> host;
  // The child waits, with a short limit, for a running parent; the child itself is stopped for a while.
  const Child child([&, parent = getpid()] {
    LocalRank self(host->ranks[1], 1, {.silence = 0.5});
    self.waiting = 1;
    self.watch.add_local(host->ranks[0].as(0, parent));
    host->ready = 1;
    if (!comes_true([&] { return host->ready == 2; })) throw Failure(Code::timeout, -1, "no parent");
    sleep_for(0.2);
    host->ready = self.alarm.is_raised() ? 4 : 3;
    sleep_for_ever();
  });
  LocalRank self(host->ranks[0], 0);
  self.watch.add_local(host->ranks[1].as(1, child.pid()));
  CHECK(comes_true([&] { return host->ready == 1; }));
  child.signal(SIGSTOP);
  sleep_for(1);
  child.signal(SIGCONT);
  host->ready = 2;
  CHECK(comes_true([&] { return host->ready > 2; }));
  CHECK_EQUAL(host->ready.load(), 3);
}

void a_neighbour_that_said_goodbye_may_end() {
  SharedWithChildren<Host> host;
  const Child child(rank_1(host, [](LocalRank&) {}));
  LocalRank self(host->ranks[0], 0, {.absence = 0.2});
  self.watch.add_local(host->ranks[1].as(1, child.pid()));
  siginfo_t info;
  CHECK_EQUAL(waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOWAIT), 0);
  sleep_for(0.4);
  CHECK(!self.alarm.is_raised());
  self.waiting = 1;  // for a rank that will never come
  CHECK(comes_true([&] { return self.alarm.is_raised(); }));
  CHECK_EQUAL(raised(self.alarm).code, Code::peer_lost);
  CHECK_EQUAL(std::string(raised(self.alarm).what()), "rank 1 left the group");
}

void a_neighbour_that_gives_up_passes_the_culprit_on() {
  struct Case {
    Code code;
    int culprit;
    const char* text;
  };
  const Case cases[] = {{Code::aborted, 1, "rank 1 gave the group up: a text of its own"},
                        {Code::peer_lost, 2, "a text of its own"},
                        {Code::timeout, 2, "rank 1 gave the group up: a text of its own"},
                        {Code::system, -1, "rank 1 gave the group up: a text of its own"}};
  for (const Case& each : cases) {
    for (bool exits : {false, true}) {
      SharedWithChildren<Host> host;
      const Child child(rank_1(host, [&](LocalRank& rank) {
        rank.watch.tell(each.code, each.culprit, "a text of its own");
        if (!exits) sleep_for_ever();
      }));
      LocalRank self(host->ranks[0], 0);
      self.watch.add_local(host->ranks[1].as(1, child.pid()));
      CHECK(comes_true([&] { return self.alarm.is_raised(); }));
      CHECK_EQUAL(raised(self.alarm).code, each.code);
      CHECK_EQUAL(raised(self.alarm).rank, each.culprit);
      CHECK_EQUAL(std::string(raised(self.alarm).what()), each.text);
    }
  }
}

void a_later_process_of_the_same_number_is_not_the_peer() {
  SharedWithChildren<Host> host;
  LocalRank self(host->ranks[0], 0);
  LocalPeer peer = host->ranks[1].as(1, getppid());
  peer.started += 1;
  self.watch.add_local(peer);
  CHECK_EQUAL(raised(self.alarm).code, Code::peer_lost);
  CHECK_EQUAL(raised(self.alarm).rank, 1);
}

void a_presence_is_lost_with_the_thread_that_held_it() {
  SharedWithChildren<Presence> lost, released, held;
  CHECK(!held->is_lost());
  std::thread holder([&] {
    lost->hold();
    released->hold();
    released->release();
  });
  holder.join();
  held->hold();
  for (int look = 0; look < 2; ++look) {
    CHECK(lost->is_lost());
    CHECK(!released->is_lost());
    std::thread other([&] { CHECK(!held->is_lost()); });
    other.join();
  }
  held->release();
}

// ---- ranks of several hosts

// A process that is rank `rank` of a group whose rank 0 is this one.
struct Meeting {
  char processes[3][64]{}, addresses[3][64]{};
  std::atomic<int> listening{0}, started{0}, told{0};
};

std::vector<Endpoint> meet(SharedWithChildren<Meeting>& meeting, NetworkRank& self, int size) {
  std::strcpy(meeting->processes[self.rank], self.network.endpoint().process.c_str());
  std::strcpy(meeting->addresses[self.rank], self.network.endpoint().address.c_str());
  meeting->listening.fetch_add(1);
  if (!comes_true([&] { return meeting->listening == size; })) throw Failure(Code::timeout, -1, "alone");
  std::vector<Endpoint> endpoints;
  for (int rank = 0; rank < size; ++rank) endpoints.push_back({meeting->processes[rank], meeting->addresses[rank]});
  return endpoints;
}

std::function<void()> remote_rank(SharedWithChildren<Meeting>& meeting, int rank, int size,
                                  const std::function<void(NetworkRank&)>& then) {
  return [&meeting, rank, size, then] {
    NetworkRank self(rank, size, {});
    self.start(meet(meeting, self, size), secret_of(7));
    meeting->started.fetch_add(1);
    then(self);
  };
}

void a_killed_remote_rank_frees_who_waits_for_its_bytes() {
  SharedWithChildren<Meeting> meeting;
  const Child child(remote_rank(meeting, 1, 2, [](NetworkRank& self) {
    self.network.channel(0).to(0, Deadline::after(20));
    sleep_for_ever();
  }));
  NetworkRank self(0, 2, {});
  self.start(meet(meeting, self, 2), secret_of(7));
  Link& link = self.network.channel(0).to(1, Deadline::after(20));
  Clock::time_point begin, end;
  std::optional<Failure> failure;
  std::thread waiter([&] {
    std::string incoming(1, '\0');
    try {
      exchange(link, "", incoming, self.alarm);
    } catch (const Failure& caught) {
      failure.emplace(caught);
      end = Clock::now();
    }
  });
  sleep_for(0.1);
  begin = Clock::now();
  child.signal(SIGKILL);
  waiter.join();
  std::printf("a killed process elsewhere freed its peer after %.2f ms\n",
              std::chrono::duration<double, std::milli>(end - begin).count());
  CHECK(failure.has_value() && failure->code == Code::peer_lost && failure->rank == 1);
  CHECK(comes_true([&] { return self.alarm.is_raised(); }));
  CHECK_EQUAL(raised(self.alarm).rank, 1);
}

void a_stopped_remote_rank_is_named_once_it_is_waited_for() {
  SharedWithChildren<Meeting> meeting;
  const Child child(remote_rank(meeting, 1, 2, [](NetworkRank&) { sleep_for_ever(); }));
  NetworkRank self(0, 2, {.limits = {.silence = 0.3}});
  self.start(meet(meeting, self, 2), secret_of(7));
  CHECK(comes_true([&] { return meeting->started == 1; }));
  child.signal(SIGSTOP);
  sleep_for(0.6);
  CHECK(!self.alarm.is_raised());
  self.waiting = 1;
  CHECK(comes_true([&] { return self.alarm.is_raised(); }));
  CHECK_EQUAL(raised(self.alarm).code, Code::peer_stopped);
  CHECK_EQUAL(raised(self.alarm).rank, 1);
}

void remote_ranks_that_run_keep_each_other_quiet() {
  Ranks ranks = form(2, {.limits = {.silence = 0.6}});
  for (auto& rank : ranks) rank->waiting = 1;
  sleep_for(1.5);
  for (auto& rank : ranks) CHECK(!rank->alarm.is_raised());
}

void a_remote_rank_that_said_goodbye_may_end() {
  Ranks ranks = form(2, {.limits = {.absence = 0.2}});
  ranks[1].reset();
  sleep_for(0.4);
  CHECK(!ranks[0]->alarm.is_raised());
  ranks[0]->waiting = 1;
  CHECK(comes_true([&] { return ranks[0]->alarm.is_raised(); }));
  CHECK_EQUAL(std::string(raised(ranks[0]->alarm).what()), "rank 1 left the group");
}

void every_rank_names_the_same_culprit() {
  Ranks ranks = form(3);
  ranks[1]->watch.tell(Code::timeout, 2, "rank 2 took too long");
  ranks[1].reset();  // it leaves at once; that must not make it the culprit
  for (int rank : {0, 2}) {
    const Alarm& alarm = ranks[static_cast<size_t>(rank)]->alarm;
    CHECK(comes_true([&] { return alarm.is_raised(); }));
    CHECK_EQUAL(raised(alarm).code, Code::timeout);
    CHECK_EQUAL(raised(alarm).rank, 2);
    CHECK_EQUAL(std::string(raised(alarm).what()), "rank 1 gave the group up: rank 2 took too long");
  }
}

void a_worker_that_a_rank_forked_off_does_not_hide_its_end() {
  SharedWithChildren<Meeting> meeting;
  SharedWithChildren<std::atomic<pid_t>> worker;
  const Child child(remote_rank(meeting, 1, 2, [&](NetworkRank&) {
    const pid_t forked = fork();
    if (forked == 0) sleep_for_ever();
    worker->store(forked);
    sleep_for_ever();
  }));
  NetworkRank self(0, 2, {});
  self.start(meet(meeting, self, 2), secret_of(7));
  CHECK(comes_true([&] { return worker->load() != 0; }));
  child.signal(SIGKILL);
  CHECK(comes_true([&] { return self.alarm.is_raised(); }, 2));  // before the limit of silence
  CHECK_EQUAL(raised(self.alarm).rank, 1);
  kill(worker->load(), SIGKILL);
}

void a_worker_that_ends_says_nothing_for_the_rank() {
  SharedWithChildren<Meeting> meeting;
  const Child child(remote_rank(meeting, 1, 2, [&](NetworkRank& self) {
    if (fork() == 0) {
      self.network.~TcpNetwork();
      self.watch.~Watch();
      _exit(0);
    }
    wait(nullptr);
    self.network.channel(0).to(0, Deadline::after(20)).send("x", 1);
    meeting->told = 1;
    sleep_for_ever();
  }));
  NetworkRank self(0, 2, {.limits = {.absence = 0.1}});
  self.waiting = 1;
  self.start(meet(meeting, self, 2), secret_of(7));
  CHECK(comes_true([&] { return meeting->told == 1; }));
  sleep_for(0.3);
  CHECK(!self.alarm.is_raised());
}

void a_rank_alone_has_no_thread() {
  SharedWithChildren<Host> host;
  const int before = open_descriptors();
  LocalRank self(host->ranks[0], 0);
  CHECK_EQUAL(open_descriptors(), before);
  self.watch.tell(Code::aborted, 0, "rank 0 aborted the group");
  CHECK_EQUAL(self.calls.load(), 1);
}

}  // namespace

int main() {
  a_killed_neighbour_is_named_at_once();
  a_stopped_neighbour_is_named_once_it_is_waited_for();
  who_was_stopped_does_not_blame_the_others();
  a_neighbour_that_said_goodbye_may_end();
  a_neighbour_that_gives_up_passes_the_culprit_on();
  a_later_process_of_the_same_number_is_not_the_peer();
  a_presence_is_lost_with_the_thread_that_held_it();
  a_killed_remote_rank_frees_who_waits_for_its_bytes();
  a_stopped_remote_rank_is_named_once_it_is_waited_for();
  remote_ranks_that_run_keep_each_other_quiet();
  a_remote_rank_that_said_goodbye_may_end();
  every_rank_names_the_same_culprit();
  a_worker_that_a_rank_forked_off_does_not_hide_its_end();
  a_worker_that_ends_says_nothing_for_the_rank();
  a_rank_alone_has_no_thread();
  return report();
}
