// The hosts of one group at an aggregator, for one slice of the buffer: their all-reduces, one after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/alarm.h"
#include "transport/aggregator_protocol.h"
#include "transport/descriptor.h"
#include "transport/tcp_link.h"

namespace shoal {

class AggregationSession {
 public:
  // By host, and then by stream.
  using Sockets = std::vector<std::vector<Descriptor>>;
  using Report = std::function<void(const std::string&)>;

  // Starts a thread, which ends when a host leaves. `report` is called on it, with what people may want to know.
  AggregationSession(Sockets sockets, Report report);
  ~AggregationSession();  // ends it

  bool has_ended() const { return has_ended_; }
  bool has_reduced() const { return operations_ > 0; }
  bool is_ending() const { return alarm_.is_raised() || has_ended_; }

  // Ends it soon, without waiting.
  void end();

 private:
  class HostLinks;

  void run();
  void serve_operations();
  bool receive_requests(std::vector<Request>& requests);
  void wait_for_requests(const std::vector<size_t>& come);
  Answer answer_to(const std::vector<Request>& requests) const;
  void refuse(Answer answer);
  void wait_for_hosts_to_leave();
  int hosts() const { return static_cast<int>(links_.size()); }

  const Report report_;
  Alarm alarm_;  // raised when the aggregator ends it
  std::vector<std::unique_ptr<TcpLink>> links_;
  std::vector<int> descriptors_;  // of all connections
  std::atomic<uint64_t> operations_{0};
  std::vector<std::byte> scratch_, sums_;
  std::atomic<bool> has_ended_{false};
  std::thread thread_;
};

}  // namespace shoal
