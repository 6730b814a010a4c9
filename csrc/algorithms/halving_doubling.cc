#include "algorithms/halving_doubling.h"

#include <algorithm>

#include "algorithms/slice.h"

// The buffer is cut into one slice per rank, and rank r counts them from its own: its "entry" i is slice r +
// i (modulo n). Halving: a rank that is responsible for entries 0 .. held - 1 keeps the first half (rounded
// up, `kept` of them) and sends the others to rank r + kept, whose entries 0, 1, ... they are; in turn it
// gets its own first held - kept entries from rank r - kept, and folds them. It starts with held = n and ends
// with held = 1: its own slice, complete. Five ranks, the entries of rank 0:
//
//   held 5, kept 3:   [0 1 2] 3 4 -> rank 3     0 1 folded with rank 2's entries 3 4
//   held 3, kept 2:   [0 1] 2     -> rank 2     0   folded with rank 3's entry 2
//   held 2, kept 1:   [0] 1       -> rank 1     0   folded with rank 4's entry 1
//
// Doubling is the reverse: a rank sends what it received and receives what it sent: a rank that has entries 0 .. kept -
// 1 sends the first held - kept of them to rank r - kept and gets the others from rank r + kept.
//
// ceil(log2 n) rounds each, in which every rank sends (n - 1) / n of the buffer. For powers of two it is the
// classic scheme with another numbering; other numbers cost no more. The price is that entries may run over
// the end of the buffer, and such a message is two steps. Slice i is folded in an order that depends on i and
// n alone.
//
// Rounds are not cut into chunks: in each of them the links are busy both ways, and bytes are folded as they come. A
// round starts when the round before it has received everything. So `ready`, the last step that received something,
// implies all steps before it.

namespace shoal {

namespace {

struct Round {
  int held, kept;

  int moved() const { return held - kept; }
};

std::vector<Round> halving_rounds(int size) {
  std::vector<Round> rounds;
  for (int held = size; held > 1; held = (held + 1) / 2) rounds.push_back({held, (held + 1) / 2});
  return rounds;
}

// Entries first .. last - 1 of a rank as regions of the buffer: two if they wrap around its end. May be empty.
struct Run {
  Region head, tail;
};

Run entries(Space space, const std::vector<size_t>& boundaries, int rank, int first, int last) {
  const int size = static_cast<int>(boundaries.size()) - 1;
  const int begin = (rank + first) % size;
  const int end = begin + last - first;
  return {slices(space, boundaries, begin, std::min(end, size)),
          slices(space, boundaries, 0, std::max(end - size, 0))};
}

// Adds the doubling: from the rank's own slice, complete after `ready`, to all of them, in the output.
void add_doubling(Schedule& schedule, const std::vector<size_t>& boundaries, int rank, int ready) {
  const int size = static_cast<int>(boundaries.size()) - 1;
  auto rounds = halving_rounds(size);
  std::reverse(rounds.begin(), rounds.end());
  for (const Round& round : rounds) {
    const int from = (rank + round.kept) % size;
    const int to = (rank + size - round.kept) % size;
    const Run leaving = entries(Space::output, boundaries, rank, 0, round.moved());
    const Run coming = entries(Space::output, boundaries, rank, round.kept, round.held);
    schedule.send(to, leaving.head, ready);
    schedule.send(to, leaving.tail, ready);
    ready = schedule.receive(from, coming.head, ready);
    ready = schedule.receive(from, coming.tail, ready);
  }
}

}  // namespace

Schedule halving_doubling_all_reduce(int rank, int size, size_t bytes, size_t element) {
  Schedule schedule;
  const auto boundaries = slice_boundaries(bytes, element, size);
  int ready = no_step;
  for (const Round& round : halving_rounds(size)) {
    const int to = (rank + round.kept) % size;
    const int from = (rank + size - round.kept) % size;
    const Run leaving = entries(Space::output, boundaries, rank, round.kept, round.held);
    const Run coming = entries(Space::output, boundaries, rank, 0, round.moved());
    schedule.send(to, leaving.head, ready);
    schedule.send(to, leaving.tail, ready);
    ready = schedule.receive_reduce(from, coming.head, coming.head.place(), ready);
    ready = schedule.receive_reduce(from, coming.tail, coming.tail.place(), ready);
  }
  add_doubling(schedule, boundaries, rank, ready);
  return schedule;
}

Schedule recursive_doubling_all_gather(int rank, int size, size_t bytes) {
  Schedule schedule;
  const auto boundaries = part_boundaries(bytes, size);
  const int own = schedule.copy(slice(Space::output, boundaries, rank), {Space::input, 0}, no_step);
  add_doubling(schedule, boundaries, rank, own);
  return schedule;
}

// The input stays as it is: sums are kept in scratch, entry i in its i-th part, from the first round on. That
// round makes the sums of all entries but those it sends away and, for odd n, the last that it keeps: the
// next round sends that one from the input. The last round puts its sum into the output.
Schedule recursive_halving_reduce_scatter(int rank, int size, size_t bytes) {
  Schedule schedule;
  if (size == 1) {
    schedule.copy({Space::output, 0, bytes}, {Space::input, 0}, no_step);
    return schedule;
  }
  const auto boundaries = part_boundaries(bytes, size);
  const int sums = size == 2 ? 0 : size / 2;  // entries 0 .. sums - 1 are in scratch after the first round
  schedule.scratch_bytes = static_cast<size_t>(sums) * bytes;
  int ready = no_step;
  for (const Round& round : halving_rounds(size)) {
    const int to = (rank + round.kept) % size;
    const int from = (rank + size - round.kept) % size;
    const bool is_first = round.held == size;
    const bool is_last = round.kept == 1;

    const int summed = is_first ? round.kept : std::clamp(sums, round.kept, round.held);
    schedule.send(to, slices(Space::scratch, boundaries, round.kept, summed), ready);
    const Run unsummed = entries(Space::input, boundaries, rank, summed, round.held);
    schedule.send(to, unsummed.head, ready);
    schedule.send(to, unsummed.tail, ready);

    const Space sums_go = is_last ? Space::output : Space::scratch;
    const Run own = is_first ? entries(Space::input, boundaries, rank, 0, round.moved())
                             : Run{slices(Space::scratch, boundaries, 0, round.moved()), {}};
    ready = schedule.receive_reduce(from, {sums_go, 0, own.head.bytes}, own.head.place(), ready);
    ready = schedule.receive_reduce(from, {sums_go, own.head.bytes, own.tail.bytes}, own.tail.place(), ready);
  }
  return schedule;
}

}  // namespace shoal
