#include "algorithms/over_aggregator.h"

#include <cstring>
#include <string>

#include "algorithms/execute.h"
#include "algorithms/in_network.h"
#include "algorithms/schedules.h"

namespace shoal {

namespace {

constexpr size_t answer_offset = 32, scratch_bytes = 64;
static_assert(sizeof(Request) <= answer_offset && answer_offset + sizeof(Answer) <= scratch_bytes);

}  // namespace

class OverAggregator::WithAggregator final : public Links {
 public:
  explicit WithAggregator(OverAggregator& owner) : owner_(owner) {}
  Link& to(int peer, Deadline deadline) override {
    return is_aggregator(peer) ? owner_.aggregator_.connect(deadline) : owner_.links_.to(peer, deadline);
  }
  Link* find(int peer) override { return is_aggregator(peer) ? nullptr : owner_.links_.find(peer); }
  int rank_of(int peer) const override { return is_aggregator(peer) ? -1 : owner_.links_.rank_of(peer); }
  std::string name_of(int peer) const override {
    return is_aggregator(peer) ? owner_.aggregator_.name() : owner_.links_.name_of(peer);
  }

 private:
  bool is_aggregator(int peer) const { return peer == owner_.hierarchy_.ranks(); }

  OverAggregator& owner_;
};

void OverAggregator::run(const Operation& op, int divisor) {
  const int peer = hierarchy_.ranks();
  const size_t element = size_of(op.dtype);
  if (op.input != op.output && op.bytes > 0) std::memcpy(op.output, op.input, op.bytes);
  Schedule schedule;
  scratch_.assign(scratch_bytes, {});
  const size_t sent = aggregated_bytes(hierarchy_, rank_, op.bytes, element);
  if (sent > 0) {
    const Request request{sent, static_cast<int>(op.dtype), static_cast<int>(op.reduction), divisor};
    std::memcpy(scratch_.data(), &request, sizeof request);
    schedule.send(peer, {Space::scratch, 0, sizeof request}, no_step);
    schedule.receive(peer, {Space::scratch, answer_offset, sizeof(Answer)}, no_step);
  }
  add_in_network_all_reduce(schedule, hierarchy_, rank_, op.bytes, element, chunk_limit);
  WithAggregator links(*this);
  try {
    execute(schedule, op.dtype, op.reduction, op.input, op.output, scratch_.data(), links, alarm_, op.deadline);
  } catch (const Failure& failure) {
    Answer answer;
    std::memcpy(&answer, scratch_.data() + answer_offset, sizeof answer);
    if (failure.code != Code::peer_lost || failure.rank >= 0) throw;
    if (answer.code != 0) {
      throw Failure(static_cast<Code>(answer.code), -1,
                    "the ranks of host " + std::to_string(answer.host) +
                        " called another operation than those of host 0 (" + aggregator_.name() + " compared their sizes and types)");
    }
    throw Failure(failure.code, -1, failure.what() + aggregator_advice());
  }
}

}  // namespace shoal
