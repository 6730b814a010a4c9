// A group's messages, and the news of leaving peers for its mailbox.

#include <algorithm>
#include <string>

#include "common/counted.h"
#include "group.h"

namespace shoal {

namespace {

// For waits for a message, which may take long: a rank without its own core leaves the cores to ranks that compute.
Patience for_messages(const Patience& patience) {
  constexpr int most_yields = 50;
  return {.spins = patience.spins, .yields = patience.yields > most_yields ? 5 : patience.yields};
}

}  // namespace

std::shared_ptr<Message> Group::send(int peer, int tag, const void* data, size_t bytes) {
  alarm_.check();
  if (peer == rank() || peer < 0 || peer >= size()) {
    throw Failure(Code::invalid, -1, "rank " + std::to_string(peer) + " is no other rank to send to");
  }
  return mailbox_->send(peer, tag, data, bytes);
}

std::shared_ptr<Message> Group::receive(int peer, int tag, void* data, size_t bytes) {
  alarm_.check();
  if (peer == rank() || peer < -1 || peer >= size()) {
    throw Failure(Code::invalid, -1, "rank " + std::to_string(peer) + " is no other rank to receive from");
  }
  return mailbox_->receive(peer, tag, data, bytes);
}

bool Group::wait(Message& message, Deadline deadline, const std::optional<Deadline>& limit) {
  Counted waiting(waiting_);
  std::optional<Counted> for_peer;
  if (message.peer >= 0) for_peer.emplace(messages_waiting_[static_cast<size_t>(message.peer)]);
  if (limit && limit->remaining() < deadline.remaining()) {
    if (!mailbox_->wait_until(message, for_messages(patience_), *limit)) return false;
  }
  try {
    mailbox_->wait(message, for_messages(patience_), deadline);
  } catch (const Failure& failure) {
    // A message of the wrong size does not affect others.
    if (failure.code == Code::mismatch) throw;
    hear_out(failure);
    abort(failure.code, failure.rank, failure.what());
    alarm_.check();
  }
  return true;
}

bool Group::is_waited_for(int rank) const {
  return operations_waiting_.load() > 0 || messages_waiting_[static_cast<size_t>(rank)].load() > 0;
}

// Data that a rank of this host offers is unchanged as long as its state says that it is running.
bool Group::is_open(int rank) const {
  std::atomic<uint32_t>& state = board_.front(hierarchy_.index_of(rank)).state;
  // Not a plain load, which could move before the loads of the data.
  return state.fetch_or(0, std::memory_order_acq_rel) == static_cast<uint32_t>(PeerState::running);
}

// Called by the Watch, before or while there is a mailbox.
void Group::note_parting(int rank, Parting parting) {
  std::lock_guard lock(wake_mutex_);
  partings_[static_cast<size_t>(rank)] = parting;
  if (mailbox_) tell_mailbox(rank, parting);
}

void Group::tell_mailbox(int rank, Parting parting) {
  if (parting == Parting::is_gone) return mailbox_->note_gone(rank);
  mailbox_->note_leaving(rank);
}

}  // namespace shoal
