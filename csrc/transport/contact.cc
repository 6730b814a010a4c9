#include "transport/contact.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace shoal {

namespace {

// The most kept messages of groups that this process has not joined: older ones are dropped.
constexpr size_t most_early = 4096;

}  // namespace

void Contact::connect(Descriptor socket) {
  if (connection_) end();
  connection_.emplace(std::move(socket));
  last_sign_ = EventLoop::Clock::now();
  loop_.add(connection_->descriptor(), EPOLLIN, [this](uint32_t) { read(); });
  for (const auto& [group, party] : parties_) send({.kind = ControlMessage::Kind::join, .group = group});
}

void Contact::join(uint64_t group, Party party) {
  parties_.insert_or_assign(group, std::move(party));
  send({.kind = ControlMessage::Kind::join, .group = group});
  std::vector<ControlMessage> waiting;
  for (const ControlMessage& message : early_) {
    if (message.group == group) waiting.push_back(message);
  }
  std::erase_if(early_, [group](const ControlMessage& message) { return message.group == group; });
  for (const ControlMessage& message : waiting) take(message);
}

bool Contact::is_awaited() const {
  return std::any_of(parties_.begin(), parties_.end(), [](const auto& entry) { return !entry.second.has_other; });
}

void Contact::send(const ControlMessage& message) {
  if (connection_) connection_->send(message);
}

void Contact::beat(double period, Time now) {
  if (now - last_beat_ < std::chrono::duration<double>(period)) return;
  last_beat_ = now;
  send({});
}

void Contact::finish() {
  if (!connection_) return;
  loop_.remove(connection_->descriptor());
  connection_->finish();
  connection_.reset();
}

void Contact::read() {
  std::vector<ControlMessage> messages;
  const bool goes_on = connection_->receive(messages);
  last_sign_ = EventLoop::Clock::now();
  for (const ControlMessage& message : messages) take(message);
  if (goes_on) return;
  end();
  on_end_();
}

void Contact::take(const ControlMessage& message) {
  using Kind = ControlMessage::Kind;
  if (message.kind == Kind::heartbeat) return;
  const auto found = parties_.find(message.group);
  if (found != parties_.end()) {
    if (message.kind == Kind::join) found->second.has_other = true;
    const auto hear = found->second.hear;  // it may leave
    return hear(message);
  }
  // Drop messages for a group that this process has left: the other process had joined it before.
  const auto is_known = [&](const ControlMessage& each) { return each.group == message.group; };
  if (message.kind != Kind::join && std::none_of(early_.begin(), early_.end(), is_known)) return;
  if (early_.size() == most_early) early_.pop_front();
  early_.push_back(message);
}

void Contact::end() {
  loop_.remove(connection_->descriptor());
  connection_.reset();
  early_.clear();
  std::vector<std::function<void()>> losses;
  for (const auto& [group, party] : parties_) {
    if (party.has_other) losses.push_back(party.on_loss);
  }
  for (const auto& lose : losses) lose();
}

}  // namespace shoal
