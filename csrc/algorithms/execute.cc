#include "algorithms/execute.h"

#include <poll.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <memory>
#include <string>

#include "algorithms/waiting.h"
#include "common/interruption.h"
#include "common/reduce.h"

// The steps towards one peer form a lane, those from one peer another, and those on this rank's own memory a last one.
// The steps of a lane run one after another, each when the step that it waits for is done. A round visits all lanes and
// moves in each as much as it can without waiting. Rounds repeat until all steps are done.

namespace shoal {

namespace {

// Received bytes are folded as they arrive, in pieces of at most this size: small enough for the first cache levels.
// Copies stop after this size too, so that the links are served in between.
constexpr size_t piece_bytes = 64 * 1024;

struct Lane {
  int peer = -1;
  int rank = -1;  // of the peer, in the group
  std::string name = {};  // the rank as a text
  bool is_sending = false;
  int step = no_step;  // the current one; no_step: all are done
  int last = no_step;
  size_t moved = 0;           // bytes of the current step
  Link* link = nullptr;       // null: the lane of this rank's own memory
  std::byte partial[8] = {};  // the beginning of an element whose end has not arrived
};

class Execution {
 public:
  Execution(const Schedule& schedule, Dtype dtype, Reduction op, const void* input, void* output,
            void* scratch, const Alarm& alarm, Deadline deadline, int divisor)
      : steps_(schedule.steps),
        dtype_(dtype),
        element_(size_of(dtype)),
        op_(op == Reduction::average ? Reduction::sum : op),
        fold_op_(op),
        divisor_(divisor),
        input_(static_cast<const std::byte*>(input)),
        output_(static_cast<std::byte*>(output)),
        scratch_(static_cast<std::byte*>(scratch)),
        alarm_(alarm),
        deadline_(deadline),
        marks_(schedule.steps.size()),
        left_(schedule.steps.size()) {
    lay_lanes();
  }

  void connect(Links& links);
  void run();

 private:
  struct Mark {
    int next = no_step;  // the step after this one in its lane
    bool is_done = false;
  };

  void lay_lanes();
  bool advance(Lane& lane);
  bool may_start(int step) const {
    const int after = steps_[static_cast<size_t>(step)].after;
    return after == no_step || marks_[static_cast<size_t>(after)].is_done;
  }
  size_t move(Lane& lane, const Step& step);
  size_t receive_and_fold(Lane& lane, const Step& step);
  size_t copy(const Lane& lane, const Step& step);
  void fold(const Step& step);
  void sleep();
  void check_deadline() const;

  const std::byte* readable(Place place) const {
    const std::byte* const base = place.space == Space::input    ? input_
                                  : place.space == Space::output ? output_
                                                                 : scratch_;
    return base + place.offset;
  }
  std::byte* writable(Place place) const {
    assert(place.space != Space::input);
    return (place.space == Space::output ? output_ : scratch_) + place.offset;
  }

  const std::vector<Step>& steps_;
  const Dtype dtype_;
  const size_t element_;
  const Reduction op_, fold_op_;
  const int divisor_;
  const std::byte* const input_;
  std::byte* const output_;
  std::byte* const scratch_;
  const Alarm& alarm_;
  const Deadline deadline_;

  std::vector<Mark> marks_;  // by step
  size_t left_;              // steps that are not done
  std::vector<Lane> lanes_;  // in the order of their first steps
  Lane local_;
  std::unique_ptr<std::byte[]> piece_;  // the last bytes to fold, for any lane
  Waiting waiting_;
  std::vector<pollfd> descriptors_;
};

void Execution::lay_lanes() {
  int peers = 0;
  size_t longest_fold = 0;
  for (const Step& step : steps_) {
    peers = std::max(peers, step.peer + 1);
    if (step.kind == Step::Kind::receive_reduce) longest_fold = std::max(longest_fold, step.region.bytes);
  }
  if (longest_fold > 0) {
    piece_ = std::make_unique_for_overwrite<std::byte[]>(std::min(longest_fold, piece_bytes));
  }

  std::vector<int> numbers(2 * static_cast<size_t>(peers), -1);  // of lanes, by peer and direction
  const auto lane_of = [&](const Step& step) -> Lane& {
    if (step.peer < 0) return local_;
    const bool is_sending = step.kind == Step::Kind::send;
    int& number = numbers[2 * static_cast<size_t>(step.peer) + (is_sending ? 1 : 0)];
    if (number < 0) {
      number = static_cast<int>(lanes_.size());
      lanes_.push_back({.peer = step.peer, .is_sending = is_sending});
    }
    return lanes_[static_cast<size_t>(number)];
  };
  for (int index = 0; index < static_cast<int>(steps_.size()); ++index) {
    Lane& lane = lane_of(steps_[static_cast<size_t>(index)]);
    (lane.last == no_step ? lane.step : marks_[static_cast<size_t>(lane.last)].next) = index;
    lane.last = index;
  }
}

// Asks for links in the order of peers. All ranks use this order. So if both ends must take part in making a link,
// there is always a link for which both ends wait: the first missing one by (lower rank, higher rank).
void Execution::connect(Links& links) {
  std::vector<Lane*> by_peer;
  for (Lane& lane : lanes_) by_peer.push_back(&lane);
  std::sort(by_peer.begin(), by_peer.end(), [](const Lane* a, const Lane* b) { return a->peer < b->peer; });
  const Lane* before = nullptr;
  for (Lane* lane : by_peer) {
    const bool is_same_link = before != nullptr && before->peer == lane->peer;
    lane->link = is_same_link ? before->link : &links.to(lane->peer, deadline_);
    lane->rank = links.rank_of(lane->peer);
    lane->name = links.name_of(lane->peer);
    before = lane;
  }
}

void Execution::run() {
  constexpr unsigned rounds_per_look_at_the_clock = 256;
  for (unsigned round = 1; left_ > 0; ++round) {
    bool has_moved = false;
    for (Lane& lane : lanes_) has_moved |= advance(lane);
    has_moved |= advance(local_);
    alarm_.check();
    if (round % rounds_per_look_at_the_clock == 0) check_deadline();
    if (has_moved) {
      waiting_.restart();
    } else if (waiting_.has_lasted()) {
      check_deadline();
      run_signal_handlers();
      sleep();
    }
  }
}

// Moves what can be moved without waiting. Returns true if anything moved.
bool Execution::advance(Lane& lane) {
  bool has_moved = false;
  while (lane.step != no_step && may_start(lane.step)) {
    const Step& step = steps_[static_cast<size_t>(lane.step)];
    const size_t bytes = move(lane, step);
    lane.moved += bytes;
    has_moved |= bytes > 0;
    if (lane.moved < step.region.bytes) break;
    has_moved = true;
    Mark& mark = marks_[static_cast<size_t>(lane.step)];
    mark.is_done = true;
    --left_;
    lane.step = mark.next;
    lane.moved = 0;
  }
  return has_moved;
}

size_t Execution::move(Lane& lane, const Step& step) {
  const size_t left = step.region.bytes - lane.moved;
  switch (step.kind) {
    case Step::Kind::send:
      return lane.link->send(readable(step.region.place()) + lane.moved, left);
    case Step::Kind::receive:
      return lane.link->receive(writable(step.region.place()) + lane.moved, left);
    case Step::Kind::receive_reduce:
      return receive_and_fold(lane, step);
    case Step::Kind::copy:
      return copy(lane, step);
    case Step::Kind::fold:
      fold(step);
      return step.region.bytes;
    case Step::Kind::wait:
      break;
  }
  return 0;
}

// Folds whole elements at once; the lane keeps the beginning of an incomplete element until its end arrives. So the
// lane's count of bytes gives the number of folded elements, and the bytes of the next one that are here.
size_t Execution::receive_and_fold(Lane& lane, const Step& step) {
  assert(step.region.bytes % element_ == 0);
  const size_t held = lane.moved % element_;
  const size_t folded = lane.moved - held;
  std::memcpy(piece_.get(), lane.partial, held);
  const size_t room = std::min(step.region.bytes - folded, piece_bytes) - held;
  const size_t received = lane.link->receive(piece_.get() + held, room);
  const size_t count = (held + received) / element_;
  if (count > 0) {
    const void* const inputs[] = {readable(step.from) + folded, piece_.get()};
    combine(dtype_, op_, writable(step.region.place()) + folded, inputs, 2, count);
  }
  const size_t rest = held + received - count * element_;
  std::memcpy(lane.partial, piece_.get() + count * element_, rest);
  return received;
}

size_t Execution::copy(const Lane& lane, const Step& step) {
  const size_t bytes = std::min(step.region.bytes - lane.moved, piece_bytes);
  std::byte* const to = writable(step.region.place()) + lane.moved;
  const std::byte* const from = readable(step.from) + lane.moved;
  // The input may be at its place in the output already.
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
  return bytes;
}

void Execution::fold(const Step& step) {
  std::vector<const void*> inputs;
  inputs.reserve(static_cast<size_t>(step.parts));
  for (int part = 0; part < step.parts; ++part) {
    inputs.push_back(readable(step.from) + static_cast<size_t>(part) * step.stride);
  }
  combine(dtype_, fold_op_, writable(step.region.place()), inputs.data(), step.parts,
          step.region.bytes / element_, divisor_);
}

void Execution::sleep() {
  descriptors_.clear();
  bool all = true;
  for (const Lane& lane : lanes_) {
    if (lane.step == no_step || !may_start(lane.step)) continue;
    all &= lane.link->append_poll(descriptors_, lane.is_sending, !lane.is_sending);
  }
  waiting_.sleep(descriptors_, all);
}

// The failure names the first rank from which something is missing; if there is none, the first that still has to
// receive.
void Execution::check_deadline() const {
  if (!deadline_.has_passed()) return;
  std::string senders, receivers;
  int first_sender = -1, first_receiver = -1;
  for (const Lane& lane : lanes_) {
    if (lane.step == no_step || !may_start(lane.step)) continue;
    std::string& ranks = lane.is_sending ? receivers : senders;
    int& first = lane.is_sending ? first_receiver : first_sender;
    if (first < 0) first = lane.rank;
    ranks += (ranks.empty() ? " " : ", ") + lane.name;
  }
  std::string text = "the operation's timeout ran out";
  if (!senders.empty()) text += "; nothing came from" + senders;
  if (!receivers.empty()) text += "; not all was taken by" + receivers;
  throw Failure(Code::timeout, first_sender >= 0 ? first_sender : first_receiver, text);
}

}  // namespace

void execute(const Schedule& schedule, Dtype dtype, Reduction op, const void* input, void* output,
             void* scratch, Links& links, const Alarm& alarm, Deadline deadline, int divisor) {
  Execution execution(schedule, dtype, op, input, output, scratch, alarm, deadline, divisor);
  execution.connect(links);
  execution.run();
}

}  // namespace shoal
