#include "transport/board.h"

#include <chrono>
#include <cstring>
#include <sstream>
#include <string>

#include "tests/check.h"
#include "tests/host_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

// What rank `index` shows at a tick.
uint64_t content(int index, int tick) {
  return static_cast<uint64_t>(index) * 1000003u + static_cast<uint64_t>(tick);
}

void write_content(Board& board, int tick) {
  const uint64_t value = content(board.index(), tick);
  board.own_notice().input.address = value;
  std::memcpy(board.own_slot() + Board::slot_bytes - sizeof value, &value, sizeof value);
}

bool shows_content(const Board& board, int index, int tick) {
  uint64_t value = 0;
  std::memcpy(&value, board.slot(index) + Board::slot_bytes - sizeof value, sizeof value);
  return value == content(index, tick) && board.notice(index).input.address == value;
}

// Fast and slow ranks all see the data of the tick, never later data.
void every_rank_sees_what_all_wrote_in_a_tick(int size, uint32_t first_tick) {
  HostRanks ranks(size, {.first_tick = first_tick});
  ranks.run([&](HostRank& rank) {
    Board& board = rank.board;
    for (int tick = 0; tick < 300; ++tick) {
      board.prepare(rank.host.patience, rank.alarm, Deadline::after(60));
      write_content(board, tick);
      board.publish();
      if ((tick + rank.index) % 7 == 0) std::this_thread::yield();
      // Some ranks check all ranks, some only one, which leaves the others for the next tick.
      if (tick % 3 == 0) {
        const int other = (rank.index + tick) % size;
        board.await(other, rank.host.patience, rank.alarm, Deadline::after(60));
        CHECK(shows_content(board, other, tick));
      } else {
        board.await_all(rank.host.patience, rank.alarm, Deadline::after(60));
        for (int other = 0; other < size; ++other) CHECK(shows_content(board, other, tick));
      }
    }
  });
}

void a_rank_that_does_not_come_is_named_when_time_runs_out() {
  HostRanks ranks(3);
  ranks.run([&](HostRank& rank) {
    if (rank.index == 2) return;
    try {
      rank.board.pass(rank.host.patience, rank.alarm, Deadline::after(0.05));
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK_EQUAL(failure.code, Code::timeout);
      CHECK_EQUAL(failure.rank, HostRanks::number_of(2));
    }
  });
}

void an_alarm_frees_a_rank_that_sleeps() {
  HostRanks ranks(2, {.patience = {.spins = 0, .yields = 0}});
  HostRank& rank = ranks[0];
  std::thread sleeper([&] {
    CHECK_THROWS(rank.board.pass(rank.host.patience, rank.alarm, Deadline::after(60)), Code::aborted);
  });
  while (rank.board.front(1).flag.sleepers.load() == 0) std::this_thread::yield();
  rank.alarm.raise(Code::aborted, 0, "enough");
  rank.board.wake_sleepers();
  sleeper.join();
}

// Two threads take turns, and each sleeps while it is not its turn. A lost wake-up would take the whole limit of a
// sleep, which otherwise only a failure takes.
void no_wake_up_of_a_flag_is_lost() {
  constexpr double limit = 20;
  constexpr uint32_t turns = 20000;
  Flag flags[2];
  const auto begin = Deadline::now();
  const auto take_turns = [&](Flag& own, Flag& other, bool is_first) {
    for (uint32_t turn = 1; turn <= turns; ++turn) {
      if (is_first) other.set(turn);
      for (uint32_t seen; (seen = own.value.load()) != turn;) own.sleep(seen, limit);
      if (!is_first) other.set(turn);
    }
  };
  std::thread one(take_turns, std::ref(flags[0]), std::ref(flags[1]), true);
  std::thread two(take_turns, std::ref(flags[1]), std::ref(flags[0]), false);
  one.join();
  two.join();
  CHECK(Deadline::now() - begin < limit);
}

void peers_of_the_same_process_can_be_read() {
  HostRanks ranks(3);
  for (int index = 0; index < 3; ++index) CHECK(ranks[index].board.can_read_peers());
}

void ranks_of_different_calls_fail_and_say_both() {
  HostRanks ranks(3);
  ranks.run([&](HostRank& rank) {
    rank.board.begin(Call(Collective::all_reduce, Dtype::float32, Reduction::maximum, 0, 64));
    rank.board.pass(rank.host.patience, rank.alarm, Deadline::after(60));
    // The type does not count where nothing is calculated.
    const Dtype dtype = rank.index == 0 ? Dtype::float32 : Dtype::int32;
    rank.board.begin(Call(Collective::broadcast, dtype, Reduction::sum, 2, 64));
    rank.board.pass(rank.host.patience, rank.alarm, Deadline::after(60));
    rank.board.begin(Call(Collective::reduce, Dtype::int64, Reduction::sum, 1, rank.index == 1 ? 8 : 16));
    rank.board.publish();
    const int other = rank.index == 1 ? 0 : 1;
    try {
      rank.board.await(other, rank.host.patience, rank.alarm, Deadline::after(60));
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK_EQUAL(failure.code, Code::mismatch);
      CHECK_EQUAL(failure.rank, HostRanks::number_of(other));
      const std::string text = failure.what();
      for (const char* bytes : {"8", "16"}) {
        CHECK(text.find("reduce of " + std::string(bytes) + " bytes of int64 (sum) with root 1") != text.npos);
      }
    }
  });
}

// The failure of rank 0 on an introduction of rank 1 that is not, or no longer, true.
Code code_of_attaching(const Introduction& told, const Introduction& own, Board& board) {
  try {
    board.attach(0, {own, told}, {HostRanks::number_of(0), HostRanks::number_of(1)});
  } catch (const Failure& failure) {
    CHECK_EQUAL(failure.rank, HostRanks::number_of(1));
    return failure.code;
  }
  return Code::ok;
}

void a_board_that_is_not_what_was_introduced_is_refused() {
  Board own(2), other(2);
  std::stringstream text;
  text << other.introduce() << " and more";
  Introduction told;
  std::string more;
  text >> told >> more;
  CHECK_EQUAL(more, "and");
  Introduction wrong = told;
  wrong.segment.cookie ^= 1;
  CHECK_EQUAL(code_of_attaching(wrong, own.introduce(), own), Code::system);
  wrong = told;
  wrong.segment.bytes -= 1;
  CHECK_EQUAL(code_of_attaching(wrong, own.introduce(), own), Code::mismatch);
  wrong = told;
  wrong.segment.cookie ^= 1;
  wrong.descriptor = 1'000'000;
  CHECK_EQUAL(code_of_attaching(wrong, own.introduce(), own), Code::system);
  CHECK_EQUAL(code_of_attaching(told, own.introduce(), own), Code::ok);
  CHECK(&own.front(1) == &other.front(0));
}

}  // namespace

int main() {
  for (const int size : {1, 2, 3, 5}) {
    every_rank_sees_what_all_wrote_in_a_tick(size, 0);
    every_rank_sees_what_all_wrote_in_a_tick(size, UINT32_MAX - 150);    // the number wraps around
    every_rank_sees_what_all_wrote_in_a_tick(size, INT32_MAX - 150u);    // the difference's sign does not
  }
  a_rank_that_does_not_come_is_named_when_time_runs_out();
  an_alarm_frees_a_rank_that_sleeps();
  no_wake_up_of_a_flag_is_lost();
  ranks_of_different_calls_fail_and_say_both();
  peers_of_the_same_process_can_be_read();
  a_board_that_is_not_what_was_introduced_is_refused();
  return report();
}
