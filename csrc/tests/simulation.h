// A second, plain executor of schedules: one thread plays all ranks, in an order drawn by chance, and moves a few bytes
// at a time. It finds missing dependencies (wrong results for some order) and deadlocks (at once), and gives the length
// of the longest chain of messages.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "algorithms/schedule.h"
#include "common/error.h"
#include "common/reduce.h"

namespace shoal::testing {

// The memory of a rank. The simulation has its own scratch, of exactly the size of the schedule.
struct Memory {
  const std::byte* input;
  size_t input_bytes;
  std::byte* output;
  size_t output_bytes;
};

class Simulation {
 public:
  // `capacity`: the bytes that a link holds.
  Simulation(std::vector<Schedule> schedules, std::vector<Memory> memories, Dtype dtype, size_t capacity,
             unsigned seed)
      : dtype_(dtype), element_(size_of(dtype)), capacity_(capacity), random_(seed) {
    for (size_t rank = 0; rank < schedules.size(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(std::move(schedules[rank]), memories[rank]));
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) lay_lanes(static_cast<int>(rank));
  }

  // Throws Failure(Code::timeout) when nothing can go on, and Failure(Code::invalid) for a step outside of
  // its memory or a link that is not empty in the end.
  void run() {
    std::vector<Lane*> open;
    for (auto& lane : lanes_) open.push_back(&lane);
    while (!open.empty()) {
      std::shuffle(open.begin(), open.end(), random_);
      bool has_moved = false;
      for (Lane* lane : open) has_moved |= advance(*lane);
      std::erase_if(open, [](const Lane* lane) { return lane->position == lane->steps.size(); });
      if (!has_moved) throw Failure(Code::timeout, -1, "deadlock");
    }
    for (const auto& [ends, stream] : streams_) require(stream.bytes.empty(), "bytes are left on a link");
  }

  // The longest chain of messages of which each had to wait for the one before.
  int critical_messages() const { return critical_messages_; }

 private:
  struct Rank {
    Rank(Schedule s, Memory m) : schedule(std::move(s)), memory(m), scratch(schedule.scratch_bytes) {
      done.resize(schedule.steps.size());
      depth.resize(schedule.steps.size());
    }

    Schedule schedule;
    Memory memory;
    std::vector<std::byte> scratch;
    std::vector<bool> done;
    std::vector<int> depth;  // messages that had to come before the step was complete
  };
  struct Lane {
    int rank;
    std::vector<int> steps;
    size_t position = 0;
    size_t moved = 0;
    int depth = 0;  // of the received part of the lane's current step; for local lanes, of all steps before
  };
  struct Stream {
    std::deque<std::byte> bytes;
    std::deque<int> depths;  // by byte
  };

  static void require(bool holds, const char* what) {
    if (!holds) throw Failure(Code::invalid, -1, what);
  }

  void lay_lanes(int rank) {
    std::map<std::pair<int, bool>, Lane> by_peer;
    const auto& steps = ranks_[static_cast<size_t>(rank)]->schedule.steps;
    for (size_t index = 0; index < steps.size(); ++index) {
      require(steps[index].after < static_cast<int>(index), "a step waits for itself or a later one");
      require(steps[index].peer != rank, "a rank sends to itself");
      Lane& lane = by_peer[{steps[index].peer, steps[index].kind == Step::Kind::send}];
      lane.rank = rank;
      lane.steps.push_back(static_cast<int>(index));
    }
    for (auto& [key, lane] : by_peer) lanes_.push_back(std::move(lane));
  }

  const std::byte* readable(Rank& rank, Place place, size_t bytes) const {
    if (place.space != Space::input) return writable(rank, place, bytes);
    require(place.offset + bytes <= rank.memory.input_bytes, "a step reads beyond the input");
    return rank.memory.input + place.offset;
  }

  std::byte* writable(Rank& rank, Place place, size_t bytes) const {
    require(place.space != Space::input, "a step writes the input");
    const bool is_output = place.space == Space::output;
    const size_t limit = is_output ? rank.memory.output_bytes : rank.scratch.size();
    require(place.offset + bytes <= limit, "a step reaches beyond the output or scratch");
    return (is_output ? rank.memory.output : rank.scratch.data()) + place.offset;
  }

  // Moves a random part of the lane's current step.
  bool advance(Lane& lane) {
    if (lane.position == lane.steps.size()) return false;
    Rank& rank = *ranks_[static_cast<size_t>(lane.rank)];
    const auto index = static_cast<size_t>(lane.steps[lane.position]);
    const Step& step = rank.schedule.steps[index];
    if (step.after != no_step && !rank.done[static_cast<size_t>(step.after)]) return false;
    const int before = step.after == no_step ? 0 : rank.depth[static_cast<size_t>(step.after)];
    const size_t moved = move(lane, rank, step, before);
    lane.moved += moved;
    if (lane.moved < step.region.bytes) return moved > 0;
    rank.done[index] = true;
    rank.depth[index] = std::max(before, lane.depth);
    critical_messages_ = std::max(critical_messages_, rank.depth[index]);
    lane.depth = step.peer < 0 ? rank.depth[index] : 0;
    lane.moved = 0;
    ++lane.position;
    return true;
  }

  size_t move(Lane& lane, Rank& rank, const Step& step, int before) {
    if (step.kind == Step::Kind::send) return send(lane, rank, step, before);
    if (step.peer >= 0) return receive(lane, rank, step);
    if (step.kind == Step::Kind::copy) {
      std::memcpy(writable(rank, step.region.place(), step.region.bytes),
                  readable(rank, step.from, step.region.bytes), step.region.bytes);
    } else if (step.kind == Step::Kind::fold) {
      std::vector<const void*> parts;
      for (size_t part = 0; part < static_cast<size_t>(step.parts); ++part) {
        const Place place{step.from.space, step.from.offset + part * step.stride};
        parts.push_back(readable(rank, place, step.region.bytes));
      }
      combine(dtype_, Reduction::sum, writable(rank, step.region.place(), step.region.bytes), parts.data(),
              step.parts, step.region.bytes / element_);
    }
    return step.region.bytes;
  }

  size_t send(const Lane& lane, Rank& rank, const Step& step, int before) {
    Stream& stream = streams_[{lane.rank, step.peer}];
    const size_t bytes = some(std::min(step.region.bytes - lane.moved, capacity_ - stream.bytes.size()));
    const std::byte* const from = readable(rank, step.region.place(), step.region.bytes) + lane.moved;
    stream.bytes.insert(stream.bytes.end(), from, from + bytes);
    stream.depths.insert(stream.depths.end(), bytes, before + 1);
    return bytes;
  }

  size_t receive(Lane& lane, Rank& rank, const Step& step) {
    Stream& stream = streams_[{step.peer, lane.rank}];
    const size_t unit = step.kind == Step::Kind::receive_reduce ? element_ : 1;
    const size_t units = some(std::min(step.region.bytes - lane.moved, stream.bytes.size()) / unit);
    std::vector<std::byte> come(units * unit);
    for (std::byte& byte : come) {
      byte = stream.bytes.front();
      lane.depth = std::max(lane.depth, stream.depths.front());
      stream.bytes.pop_front();
      stream.depths.pop_front();
    }
    std::byte* const to = writable(rank, step.region.place(), step.region.bytes) + lane.moved;
    if (step.kind == Step::Kind::receive_reduce) {
      const void* const parts[] = {readable(rank, step.from, step.region.bytes) + lane.moved, come.data()};
      combine(dtype_, Reduction::sum, to, parts, 2, units);
    } else {
      std::copy(come.begin(), come.end(), to);
    }
    return come.size();
  }

  // 1 .. most, often most; 0 if that is 0.
  size_t some(size_t most) {
    if (most == 0 || random_() % 2 == 0) return most;
    return 1 + random_() % most;
  }

  const Dtype dtype_;
  const size_t element_;
  const size_t capacity_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::deque<Lane> lanes_;
  std::map<std::pair<int, int>, Stream> streams_;  // by sender and receiver
  int critical_messages_ = 0;
};

}  // namespace shoal::testing
