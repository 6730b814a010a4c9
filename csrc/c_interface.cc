#include "c_interface.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "common/reduce.h"
#include "group.h"
#include "measure.h"

using namespace shoal;

namespace {

thread_local int last_rank = -1;
thread_local std::string last_text;

// The process's buffers outlive every group, and are never destroyed: tensors may be, after everything else.
SharedBuffers& shared_buffers() {
  static auto* buffers = new SharedBuffers;
  return *buffers;
}

int64_t remember(Code code, int rank, const std::string& text) {
  last_rank = rank;
  last_text = text;
  return -static_cast<int64_t>(code);
}

template <class Function>
int64_t guarded(const Function& function) {
  try {
    return function();
  } catch (const Failure& failure) {
    return remember(failure.code, failure.rank, failure.what());
  } catch (const std::exception& error) {
    return remember(Code::system, -1, error.what());
  }
}

}  // namespace

// A group and what was begun on it and not yet waited for.
struct shoal_group {
  using Begun = std::variant<std::shared_ptr<Task>, std::shared_ptr<Message>>;

  shoal_group(const GroupOptions& options) : group(options, shared_buffers()) {}

  int64_t keep(Begun begun) {
    std::lock_guard lock(mutex);
    tickets.emplace(++last_ticket, std::move(begun));
    return last_ticket;
  }

  Begun find(int64_t ticket) {
    std::lock_guard lock(mutex);
    auto found = tickets.find(ticket);
    if (found == tickets.end()) throw Failure(Code::invalid, -1, "no operation has this ticket");
    return found->second;
  }

  void forget(int64_t ticket) {
    std::lock_guard lock(mutex);
    tickets.erase(ticket);
  }

  Group group;
  std::mutex mutex;
  std::map<int64_t, Begun> tickets;
  int64_t last_ticket = 0;
};

int shoal_last_failure(int* rank, char* text, size_t capacity) {
  *rank = last_rank;
  const size_t length = std::min(last_text.size(), capacity - 1);
  std::memcpy(text, last_text.data(), length);
  text[length] = 0;
  return static_cast<int>(length);
}

shoal_group* shoal_group_create(int rank, int size, const int* hosts, const char* bind_address, int streams,
                                double heartbeat) {
  shoal_group* made = nullptr;
  guarded([&] {
    made = new shoal_group(GroupOptions{rank, std::vector<int>(hosts, hosts + size), bind_address, streams, heartbeat});
    return 0;
  });
  return made;
}

int shoal_group_introduce(shoal_group* group, char* text, size_t capacity) {
  return static_cast<int>(guarded([&] {
    const std::string introduction = group->group.introduce();
    if (introduction.size() + 1 > capacity) throw Failure(Code::invalid, -1, "an introduction is longer than its buffer");
    std::memcpy(text, introduction.c_str(), introduction.size() + 1);
    return 0;
  }));
}

int shoal_group_join(shoal_group* group, const char* const* introductions, const char* secret, double timeout) {
  return static_cast<int>(guarded([&] {
    const std::vector<std::string> all(introductions, introductions + group->group.size());
    Secret bytes;
    std::memcpy(bytes.data(), secret, bytes.size());
    return group->group.join(all, bytes, Deadline::after(timeout)) ? 1 : 0;
  }));
}

int shoal_group_start(shoal_group* group, int can_read_peers) {
  return static_cast<int>(guarded([&] {
    group->group.start(can_read_peers != 0);
    return 0;
  }));
}

int shoal_group_abort(shoal_group* group, const char* text) {
  return static_cast<int>(guarded([&] {
    group->group.abort(Code::aborted, group->group.rank(), text);
    return 0;
  }));
}

void shoal_group_close(shoal_group* group) { delete group; }

int64_t shoal_begin(shoal_group* group, const shoal_call* call) {
  return guarded([&]() -> int64_t {
    Operation operation;
    operation.collective = static_cast<Collective>(call->collective);
    operation.algorithm = static_cast<Algorithm>(call->algorithm);
    operation.dtype = static_cast<Dtype>(call->dtype);
    operation.reduction = static_cast<Reduction>(call->reduction);
    operation.root = call->root;
    operation.input = call->input;
    operation.output = call->output;
    operation.bytes = call->bytes;
    if (call->send_bytes != nullptr) {
      operation.send_bytes.assign(call->send_bytes, call->send_bytes + group->group.size());
      operation.receive_bytes.assign(call->receive_bytes, call->receive_bytes + group->group.size());
    }
    operation.deadline = Deadline::after(call->timeout);
    auto task = group->group.call(std::move(operation), call->asynchronous != 0);
    return task ? group->keep(std::move(task)) : 0;
  });
}

int64_t shoal_send(shoal_group* group, int peer, int tag, const void* data, uint64_t bytes) {
  return guarded([&]() -> int64_t {
    auto message = group->group.send(peer, tag, data, bytes);
    return message->done && !message->failure ? 0 : group->keep(std::move(message));
  });
}

int64_t shoal_receive(shoal_group* group, int peer, int tag, void* data, uint64_t bytes) {
  return guarded([&] { return group->keep(group->group.receive(peer, tag, data, bytes)); });
}

int shoal_wait(shoal_group* group, int64_t ticket, double timeout, double* finished) {
  return static_cast<int>(guarded([&] {
    const auto begun = group->find(ticket);
    group->forget(ticket);
    if (const auto* task = std::get_if<std::shared_ptr<Task>>(&begun)) {
      group->group.wait(**task);
      *finished = (*task)->finished;
      return 0;
    }
    auto& message = *std::get<std::shared_ptr<Message>>(begun);
    group->group.wait(message, Deadline::after(timeout));
    *finished = message.finished;
    return message.peer;
  }));
}

int shoal_test(shoal_group* group, int64_t ticket) {
  return static_cast<int>(guarded([&] {
    return std::visit([](const auto& begun) { return begun->done.load() ? 1 : 0; }, group->find(ticket));
  }));
}

void* shoal_buffer_allocate(uint64_t bytes) {
  void* data = nullptr;
  guarded([&] {
    data = shared_buffers().allocate(bytes);
    return 0;
  });
  return data;
}

int shoal_buffer_release(void* data) {
  return static_cast<int>(guarded([&] {
    shared_buffers().release(data);
    return 0;
  }));
}

int shoal_buffer_trim(void) {
  return static_cast<int>(guarded([&] {
    shared_buffers().trim();
    return 0;
  }));
}

const char* shoal_vector_unit(void) { return vector_unit(); }

int shoal_force_vector_unit(const char* name) { return force_vector_unit(name) ? 1 : 0; }

int shoal_combine(int dtype, int reduction, void* output, const void* const* inputs, int count_of_inputs,
                  uint64_t count, int divisor) {
  return static_cast<int>(guarded([&] {
    combine(static_cast<Dtype>(dtype), static_cast<Reduction>(reduction), output, inputs, count_of_inputs, count, divisor);
    return 0;
  }));
}

double shoal_flag_latency(int core, int other) { return flag_latency(core, other); }
