// The collectives in which every rank puts what others need into its slot.

#include <cstring>
#include <string>

#include "algorithms/host.h"
#include "common/reduce.h"

namespace shoal {

namespace {

// What an operation puts into this rank's slot.
struct Payload {
  const void* data;
  size_t bytes;
};

Payload payload_of(const Operation& op, const Board& board) {
  const auto size = static_cast<size_t>(board.size());
  const bool is_root = op.root == board.index();
  switch (op.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::all_gather:
    case Collective::gather:
      return {op.input, op.bytes};
    case Collective::reduce_scatter:
      return {op.input, op.bytes * size};
    case Collective::broadcast:
      return {op.input, is_root ? op.bytes : 0};
    case Collective::scatter:
      return {op.input, is_root ? op.bytes * size : 0};
    default:
      return {nullptr, 0};
  }
}

// Folds the bytes from `offset` of every slot into `out`.
void fold_slots(const Operation& op, const Board& board, size_t offset) {
  constexpr int few_ranks = 64;
  const void* few[few_ranks];
  std::vector<const void*> many;
  const void** slots = few;
  if (board.size() > few_ranks) {
    many.resize(static_cast<size_t>(board.size()));
    slots = many.data();
  }
  for (int index = 0; index < board.size(); ++index) slots[index] = board.slot(index) + offset;
  combine(op.dtype, op.reduction, op.output, slots, board.size(), op.bytes / size_of(op.dtype), board.size());
}

// Copies a part out of a slot to the output's part `part`.
void take_part(const Operation& op, const std::byte* from, int part) {
  if (op.bytes == 0) return;  // then there may be no output
  std::memcpy(static_cast<std::byte*>(op.output) + static_cast<size_t>(part) * op.bytes, from, op.bytes);
}

void gather_slots(const Operation& op, const Board& board) {
  for (int index = 0; index < board.size(); ++index) take_part(op, board.slot(index), index);
}

}  // namespace

bool fits_one_shot(const Operation& op, int size) {
  switch (op.collective) {
    case Collective::barrier:
      return true;
    case Collective::all_to_all:
      return false;
    case Collective::reduce_scatter:
    case Collective::scatter:
      return op.bytes * static_cast<size_t>(size) <= one_shot_bytes;
    default:
      return op.bytes <= one_shot_bytes;
  }
}

void begin_one_shot(const Operation& op, Host& host) {
  Board& board = host.board;
  if (!fits_one_shot(op, board.size())) {
    throw Failure(Code::invalid, -1, std::to_string(op.bytes) + " bytes do not fit a slot of one-shot");
  }
  board.prepare(host.patience, host.alarm, op.deadline);
  const Payload payload = payload_of(op, board);
  if (payload.bytes > 0) std::memcpy(board.own_slot(), payload.data, payload.bytes);
  board.publish();
}

void finish_one_shot(const Operation& op, Host& host) {
  Board& board = host.board;
  const bool is_root = op.root == board.index();
  const auto own = static_cast<size_t>(board.index());
  const auto await_all = [&] { board.await_all(host.patience, host.alarm, op.deadline); };
  const auto await_root = [&] { board.await(op.root, host.patience, host.alarm, op.deadline); };
  switch (op.collective) {
    case Collective::barrier:
      return await_all();
    case Collective::all_reduce:
      await_all();
      return fold_slots(op, board, 0);
    case Collective::reduce_scatter:
      await_all();
      return fold_slots(op, board, own * op.bytes);
    case Collective::all_gather:
      await_all();
      return gather_slots(op, board);
    case Collective::reduce:
      if (!is_root) return;
      await_all();
      return fold_slots(op, board, 0);
    case Collective::gather:
      if (!is_root) return;
      await_all();
      return gather_slots(op, board);
    case Collective::broadcast:
      if (is_root) return;
      await_root();
      return take_part(op, board.slot(op.root), 0);
    case Collective::scatter:
      await_root();
      return take_part(op, board.slot(op.root) + own * op.bytes, 0);
    default:
      return;
  }
}

}  // namespace shoal
