#include "transport/dialer.h"

#include <sys/epoll.h>

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "transport/tcp_socket.h"

namespace shoal {

namespace {

// Seconds between attempts: twice as long every time.
constexpr double first_pause = 0.01, longest_pause = 1;

}  // namespace

void Dialer::dial(const std::string& address, Next next) {
  calls_.push_back({.address = address, .next = std::move(next), .pause = first_pause});
  attempt(std::prev(calls_.end()));
}

void Dialer::withdraw(uint64_t group) {
  std::erase_if(troubles_, [group](const auto& entry) { return entry.first.first == group; });
  for (auto call = calls_.begin(); call != calls_.end();) {
    const auto current = call++;
    if (current->purpose.group != group) continue;
    loop_.cancel(current->timer);
    if (current->socket) loop_.remove(current->socket.number());
    current->socket = Descriptor();
    attempt(current);
  }
}

void Dialer::close() {
  for (Call& call : calls_) {
    loop_.cancel(call.timer);
    if (call.socket) loop_.remove(call.socket.number());
  }
  calls_.clear();
}

Dialer::Trouble Dialer::trouble_with(uint64_t group, int rank) const {
  const auto found = troubles_.find({group, rank});
  return found == troubles_.end() ? Trouble{} : found->second;
}

void Dialer::attempt(Calls::iterator call) {
  const auto credentials = call->next();
  if (!credentials) {
    calls_.erase(call);
    return;
  }
  call->purpose = credentials->purpose;
  call->handshake = Handshake::dial(credentials->secret, credentials->purpose);
  try {
    call->socket = begin_to_connect(call->address);
    loop_.add(call->socket.number(), EPOLLIN, [this, call](uint32_t) { converse(call); });
  } catch (const Failure& failure) {
    call->socket = Descriptor();
    try_again(call, failure.what(), false);
  }
}

void Dialer::converse(Calls::iterator call) {
  const auto [progress, error] = call->handshake.converse(call->socket.number());
  if (progress == Handshake::Progress::underway) return;
  loop_.remove(call->socket.number());
  Descriptor socket = std::move(call->socket);
  call->socket = Descriptor();
  switch (progress) {
    case Handshake::Progress::done: {
      const Purpose purpose = call->purpose;
      calls_.erase(call);
      return admit_(purpose, std::move(socket));
    }
    case Handshake::Progress::refused:
      return try_again(call, call->address + " does not know the group's secret", true);
    default:
      if (error == 0) return try_again(call, call->address + " did not let this rank in", true);
      return try_again(call, call->address + ": " + std::generic_category().message(error), false);
  }
}

void Dialer::try_again(Calls::iterator call, const std::string& trouble, bool was_refused) {
  troubles_[{call->purpose.group, call->purpose.to}] = {trouble, was_refused};
  call->timer = loop_.after(call->pause, [this, call] { attempt(call); });
  call->pause = std::min(2 * call->pause, longest_pause);
}

}  // namespace shoal
