#include "transport/hub.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "common/error.h"

namespace shoal {

namespace {

// The channel of a control connection, which is not a link.
constexpr int contact_channel = -1;

std::string new_name() {
  uint64_t number[2];
  if (getrandom(number, sizeof number, 0) != sizeof number) throw system_failure("no random numbers", errno);
  char name[33];
  std::snprintf(name, sizeof name, "%016llx%016llx", static_cast<unsigned long long>(number[0]),
                static_cast<unsigned long long>(number[1]));
  return name;
}

}  // namespace

Hub::Hub(double handshake_limit)
    : process_(new_name()),
      handshake_limit_(handshake_limit),
      processes_(loop_),
      dialer_(loop_, [this](const Purpose& purpose, Descriptor socket) { admit(purpose, std::move(socket)); }) {}

Hub::~Hub() {
  loop_.call([this] {
    for (auto& [address, listener] : listeners_) listener->close();
    dialer_.close();
    acquaintances_.clear();
  });
  loop_.stop();
}

Endpoint Hub::listen(const std::string& bind_address) {
  Endpoint endpoint{process_, {}};
  loop_.start();
  loop_.call([&] {
    auto found = listeners_.find(bind_address);
    if (found == listeners_.end()) {
      auto listener = std::make_unique<Listener>(bind_address, handshake_limit_, loop_);
      listener->open([this](uint64_t group) { return find(group); },
                     [this](const Purpose& purpose, Descriptor socket) { admit(purpose, std::move(socket)); });
      found = listeners_.emplace(bind_address, std::move(listener)).first;
    }
    endpoint.address = found->second->address();
  });
  return endpoint;
}

int Hub::refused() {
  int refused = 0;
  loop_.call([&] {
    for (const auto& [address, listener] : listeners_) refused += listener->refused();
  });
  return refused;
}

void Hub::enrol(uint64_t group, Member member) {
  if (!members_.emplace(group, std::move(member)).second) {
    throw Failure(Code::invalid, -1, "this process is in a group with the same secret already");
  }
  for (const auto& [address, listener] : listeners_) listener->look_again();
}

void Hub::withdraw(uint64_t group) {
  if (members_.erase(group) == 0) return;
  for (auto each = acquaintances_.begin(); each != acquaintances_.end();) {
    Acquaintance& acquaintance = each->second;
    acquaintance.ranks.erase(group);
    if (acquaintance.ranks.empty()) {
      acquaintance.contact->finish();
      each = acquaintances_.erase(each);
    } else {
      ++each;
    }
  }
  dialer_.withdraw(group);
}

std::shared_ptr<Contact> Hub::contact(const Endpoint& endpoint, uint64_t group, int peer) {
  const std::string& process = endpoint.process;
  if (process == process_) {
    throw Failure(Code::invalid, peer, "ranks of one process cannot be on different hosts");
  }
  Acquaintance& acquaintance = acquaintances_[process];
  if (!acquaintance.contact) {
    acquaintance.contact = std::make_shared<Contact>(loop_, [this, process] { make_up_for(process); });
  }
  acquaintance.endpoint = endpoint;
  acquaintance.ranks[group] = peer;
  dial_contact(process);
  return acquaintance.contact;
}

// The connection ended. Groups whose rank there had joined have lost the rank; other groups still wait for it.
void Hub::make_up_for(const std::string& process) {
  const auto found = acquaintances_.find(process);
  if (found != acquaintances_.end() && found->second.contact->is_awaited()) dial_contact(process);
}

void Hub::dial_contact(const std::string& process) {
  const auto found = acquaintances_.find(process);
  if (found == acquaintances_.end() || process_ < process) return;
  Acquaintance& acquaintance = found->second;
  if (acquaintance.contact->is_connected() || std::exchange(acquaintance.is_dialed, true)) return;
  dialer_.dial(acquaintance.endpoint.address, [this, process] { return next_attempt(process); });
}

// The groups that want the contact take turns: the other process may not have joined some of them yet.
std::optional<Dialer::Credentials> Hub::next_attempt(const std::string& process) {
  const auto found = acquaintances_.find(process);
  if (found == acquaintances_.end()) return std::nullopt;
  Acquaintance& acquaintance = found->second;
  if (acquaintance.contact->is_connected()) {
    acquaintance.is_dialed = false;
    return std::nullopt;
  }
  auto next = acquaintance.ranks.upper_bound(acquaintance.last_tried);
  if (next == acquaintance.ranks.end()) next = acquaintance.ranks.begin();
  const auto [group, peer] = *next;
  acquaintance.last_tried = group;
  const Member& member = members_.at(group);
  return Dialer::Credentials{{group, member.rank, peer, contact_channel, 0}, member.secret};
}

void Hub::dial(const std::string& address, const Purpose& purpose) {
  dialer_.dial(address, [this, purpose]() -> std::optional<Dialer::Credentials> {
    const auto membership = find(purpose.group);
    if (!membership) return std::nullopt;
    return Dialer::Credentials{purpose, membership->secret};
  });
}

std::optional<Membership> Hub::find(uint64_t group) const {
  const auto found = members_.find(group);
  if (found == members_.end()) return std::nullopt;
  return Membership{found->second.secret, found->second.rank};
}

// The other end belongs to the group.
void Hub::admit(const Purpose& purpose, Descriptor socket) {
  if (purpose.channel == contact_channel) return admit_contact(purpose, std::move(socket));
  const auto found = members_.find(purpose.group);
  if (found != members_.end()) found->second.admit(purpose, std::move(socket));
}

void Hub::admit_contact(const Purpose& purpose, Descriptor socket) {
  const auto member = members_.find(purpose.group);
  if (member == members_.end()) return;
  const bool is_own_call = purpose.from == member->second.rank;
  const int peer = is_own_call ? purpose.to : purpose.from;
  for (auto& [process, acquaintance] : acquaintances_) {
    const auto rank = acquaintance.ranks.find(purpose.group);
    if (rank == acquaintance.ranks.end() || rank->second != peer) continue;
    // Only one of the two dials, and a proven member follows this rule.
    if (is_own_call != (process < process_)) return;
    if (is_own_call) acquaintance.is_dialed = false;
    acquaintance.contact->connect(std::move(socket));
    return;
  }
}

}  // namespace shoal
