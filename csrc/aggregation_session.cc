#include "aggregation_session.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "algorithms/execute.h"
#include "algorithms/in_network.h"
#include "algorithms/schedules.h"
#include "algorithms/slice.h"
#include "algorithms/waiting.h"
#include "common/quiet_thread.h"
#include "common/reduce.h"

// A host that is lost ends the session, but the aggregator keeps the connections of the other hosts open for some
// seconds: these learn from each other which rank is lost, and would otherwise blame the aggregator.

namespace shoal {

namespace {

constexpr double farewell = 10;          // seconds for the other hosts to leave
constexpr int alarm_look = 100;          // milliseconds between checks of the alarm
constexpr double unlimited = 1e9;        // seconds: the hosts have the time limits
constexpr size_t answer_bytes = line_bytes;  // at the beginning of scratch
constexpr size_t most_at_once = 256 * chunk_limit;  // bytes: a schedule of more would be long

}  // namespace

class AggregationSession::HostLinks final : public Links {
 public:
  explicit HostLinks(AggregationSession& session) : session_(session) {}
  Link& to(int host, Deadline) override { return *session_.links_[static_cast<size_t>(host)]; }
  Link* find(int host) override { return session_.links_[static_cast<size_t>(host)].get(); }

 private:
  AggregationSession& session_;
};

AggregationSession::AggregationSession(Sockets sockets, Report report) : report_(std::move(report)) {
  for (size_t host = 0; host < sockets.size(); ++host) {
    for (const Descriptor& socket : sockets[host]) descriptors_.push_back(socket.number());
    links_.push_back(std::make_unique<TcpLink>(static_cast<int>(host), std::move(sockets[host]), alarm_,
                                               "host " + std::to_string(host)));
  }
  thread_ = start_quiet_thread([this] { run(); });
}

AggregationSession::~AggregationSession() {
  end();
  thread_.join();
}

void AggregationSession::end() { alarm_.raise(Code::aborted, -1, "the aggregator ends it"); }

void AggregationSession::run() {
  const std::string name = "a group of " + std::to_string(hosts()) + " hosts";
  try {
    report_(name + " joined");
    serve_operations();
    report_(name + " left after " + std::to_string(operations_) + " operations");
  } catch (const std::exception& failure) {
    report_(name + " ended after " + std::to_string(operations_) + " operations: " + failure.what());
  }
  if (!alarm_.is_raised()) wait_for_hosts_to_leave();
  links_.clear();
  has_ended_ = true;
}

void AggregationSession::serve_operations() {
  std::vector<Request> requests(links_.size());
  HostLinks links(*this);
  while (receive_requests(requests)) {
    const Answer answer = answer_to(requests);
    if (answer.code != 0) return refuse(answer);
    const Request& request = requests.front();
    const auto dtype = static_cast<Dtype>(request.dtype);
    for (uint64_t done = 0; done < request.bytes; done += most_at_once) {
      Schedule schedule;
      if (done == 0) {
        for (int host = 0; host < hosts(); ++host) {
          schedule.send(host, {Space::scratch, 0, sizeof answer}, no_step);
        }
      }
      const size_t bytes = std::min<uint64_t>(request.bytes - done, most_at_once);
      add_aggregation(schedule, hosts(), bytes, size_of(dtype), chunk_limit, answer_bytes);
      scratch_.resize(std::max(scratch_.size(), schedule.scratch_bytes));
      sums_.resize(aggregation_windows * chunk_limit);
      std::memcpy(scratch_.data(), &answer, sizeof answer);
      execute(schedule, dtype, static_cast<Reduction>(request.reduction), nullptr, sums_.data(), scratch_.data(), links,
              alarm_, Deadline::after(unlimited), request.divisor);
    }
    ++operations_;
  }
}

// Returns false if a host left instead, and none had begun an operation.
bool AggregationSession::receive_requests(std::vector<Request>& requests) {
  std::vector<size_t> come(links_.size());
  for (size_t missing = links_.size(); missing > 0;) {
    for (size_t host = 0; host < links_.size(); ++host) {
      if (come[host] == sizeof(Request)) continue;
      try {
        auto* const bytes = reinterpret_cast<std::byte*>(&requests[host]);
        come[host] += links_[host]->receive(bytes + come[host], sizeof(Request) - come[host]);
      } catch (const Failure& failure) {
        if (std::all_of(come.begin(), come.end(), [](size_t count) { return count == 0; })) return false;
        throw;
      }
      if (come[host] == sizeof(Request)) --missing;
    }
    if (missing > 0) wait_for_requests(come);
  }
  return true;
}

void AggregationSession::wait_for_requests(const std::vector<size_t>& come) {
  std::vector<pollfd> descriptors;
  for (size_t host = 0; host < links_.size(); ++host) {
    if (come[host] < sizeof(Request)) links_[host]->append_poll(descriptors, false, true);
  }
  poll(descriptors.data(), descriptors.size(), alarm_look);
  alarm_.check();
}

Answer AggregationSession::answer_to(const std::vector<Request>& requests) const {
  const Request& first = requests.front();
  for (size_t host = 1; host < requests.size(); ++host) {
    if (!(requests[host] == first)) return {static_cast<int32_t>(Code::mismatch), static_cast<int32_t>(host)};
  }
  constexpr int dtypes = static_cast<int>(Dtype::boolean) + 1, reductions = static_cast<int>(Reduction::bit_xor) + 1;
  const bool is_known = first.dtype >= 0 && first.dtype < dtypes && first.reduction >= 0 &&
                        first.reduction < reductions && first.divisor > 0;
  if (!is_known || first.bytes % size_of(static_cast<Dtype>(first.dtype)) != 0) {
    return {static_cast<int32_t>(Code::invalid), 0};
  }
  require_supported(static_cast<Dtype>(first.dtype), static_cast<Reduction>(first.reduction));
  return {};
}

void AggregationSession::refuse(Answer answer) {
  report_("host " + std::to_string(answer.host) + " called another operation than host 0");
  for (const auto& link : links_) link->send(&answer, sizeof answer);  // there is room for so little
  for (const int descriptor : descriptors_) shutdown(descriptor, SHUT_WR);
}

void AggregationSession::wait_for_hosts_to_leave() {
  std::vector<pollfd> open;
  for (const int descriptor : descriptors_) open.push_back({descriptor, POLLIN, 0});
  const Deadline limit = Deadline::after(farewell);
  std::array<char, 16 * 1024> unwanted;
  while (!open.empty() && !limit.has_passed() && !alarm_.is_raised()) {
    poll(open.data(), open.size(), alarm_look);
    std::erase_if(open, [&](const pollfd& each) {
      if (each.revents == 0) return false;
      const ssize_t count = recv(each.fd, unwanted.data(), unwanted.size(), MSG_DONTWAIT);
      return count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    });
  }
}

}  // namespace shoal
