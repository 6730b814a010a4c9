#include "c_interface.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>

#include "aggregator.h"
#include "algorithms/host.h"
#include "algorithms/mailbox.h"
#include "codecs/codec.h"
#include "common/interruption.h"
#include "common/reduce.h"
#include "group.h"
#include "measure.h"
#include "transport/descriptor.h"
#include "visited_group.h"

using namespace shoal;

namespace {

thread_local int last_rank = -1;
thread_local std::string last_text;

// The buffers of the process outlive every group, and are never destroyed: tensors may be destroyed after everything
// else. A forked process has its own buffers: memory that it gave back and took again would still belong to its parent.
SharedBuffers& shared_buffers() {
  static std::atomic<SharedBuffers*> buffers;
  static std::once_flag once;
  std::call_once(once, [] {
    raise_descriptor_limit();
    buffers = new SharedBuffers;
    pthread_atfork(nullptr, nullptr, [] { buffers = new SharedBuffers; });
  });
  return *buffers;
}

// The state that the process's groups share: made with the first group, destroyed with the last. A forked process has
// its own.
std::shared_ptr<Hub> process_hub() {
  struct Place {
    std::mutex mutex;
    std::weak_ptr<Hub> hub;
  };
  static std::atomic<Place*> place;
  static std::once_flag once;
  std::call_once(once, [] {
    place = new Place;
    pthread_atfork(nullptr, nullptr, [] { place = new Place; });
  });
  std::lock_guard lock(place.load()->mutex);
  std::shared_ptr<Hub> hub = place.load()->hub.lock();
  if (!hub) place.load()->hub = hub = std::make_shared<Hub>();
  return hub;
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

// As above, for calls that wait: an interruption by a signal takes precedence over the failure that it caused.
template <class Function>
int64_t interruptible(const Function& function) {
  const int64_t outcome = guarded(function);
  return was_interrupted() ? -static_cast<int64_t>(Code::interrupted) : outcome;
}

int hand_out(const std::string& what, char* text, size_t capacity) {
  if (what.size() + 1 > capacity) throw Failure(Code::invalid, -1, "a text is longer than its buffer");
  std::memcpy(text, what.c_str(), what.size() + 1);
  return 0;
}

// The 32 bytes of a secret; none for a null pointer.
std::optional<Secret> secret_at(const char* bytes) {
  if (bytes == nullptr) return std::nullopt;
  Secret secret;
  std::memcpy(secret.data(), bytes, secret.size());
  return secret;
}

}  // namespace

// A group, and its operations that are not forgotten yet. After it is closed, it stays until no caller can ask for it.
struct shoal_group {
  struct Begun {
    std::variant<std::shared_ptr<Task>, std::shared_ptr<Message>> what;
    Deadline deadline;  // of messages; an operation has its own
  };

  explicit shoal_group(const GroupOptions& options)
      : group(std::make_shared<VisitedGroup>(options, shared_buffers(), process_hub())) {}

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

  const std::shared_ptr<VisitedGroup> group;
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
                                double heartbeat, const char* aggregator, const char* aggregator_secret) {
  shoal_group* made = nullptr;
  guarded([&] {
    const std::vector<int> all_hosts(hosts, hosts + size);
    const GroupOptions options{rank, all_hosts, bind_address, streams, heartbeat, aggregator,
                               secret_at(aggregator_secret)};
    try {
      made = new shoal_group(options);
    } catch (const Failure& failure) {
      if (!has_run_out(failure.error)) throw;
      shared_buffers().trim();
      made = new shoal_group(options);
    }
    return 0;
  });
  return made;
}

int shoal_group_allow_reads(shoal_group* group, const int* peers, int count) {
  return static_cast<int>(guarded([&] {
    Visit(*group->group)->allow_reads_by({peers, peers + count});
    return 0;
  }));
}

int shoal_group_introduce(shoal_group* group, char* text, size_t capacity) {
  return static_cast<int>(guarded([&] {
    const std::string introduction = Visit(*group->group)->introduce();
    return hand_out(introduction, text, capacity);
  }));
}

int shoal_group_join(shoal_group* group, const char* const* introductions, const char* secret,
                     double timeout) {
  return static_cast<int>(interruptible([&] {
    const Visit visit(*group->group);
    const std::vector<std::string> all(introductions, introductions + visit->size());
    return static_cast<int>(visit->join(all, *secret_at(secret), Deadline::after(timeout)));
  }));
}

int shoal_group_start(shoal_group* group, int can_read_peers) {
  return static_cast<int>(guarded([&] { return Visit(*group->group)->start(can_read_peers != 0); }));
}

int shoal_group_abort(shoal_group* group, const char* text) {
  return static_cast<int>(guarded([&] {
    const Visit visit(*group->group);
    visit->abort(Code::aborted, visit->rank(), text);
    return 0;
  }));
}

int shoal_group_check(shoal_group* group) {
  return static_cast<int>(guarded([&] {
    Visit(*group->group)->check();
    return 0;
  }));
}

void shoal_group_close(shoal_group* group) { group->group->close(); }

void shoal_group_free(shoal_group* group) {
  group->group->close();
  if (!group->group->is_forked()) delete group;
}

int64_t shoal_begin(shoal_group* group, const shoal_call* call) {
  return guarded([&]() -> int64_t {
    const Visit visit(*group->group);
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
      operation.send_bytes.assign(call->send_bytes, call->send_bytes + visit->size());
      operation.receive_bytes.assign(call->receive_bytes, call->receive_bytes + visit->size());
    }
    if (call->stripes != nullptr) operation.stripes.emplace();
    for (uint64_t index = 0; call->stripes != nullptr && index < call->stripe_count; ++index) {
      operation.stripes->push_back({call->stripes[2 * index], call->stripes[2 * index + 1]});
    }
    const Deadline deadline = operation.deadline = Deadline::after(call->timeout);
    auto task = visit->call(std::move(operation), call->asynchronous != 0);
    return task ? group->keep({std::move(task), deadline}) : 0;
  });
}

int64_t shoal_send(shoal_group* group, int peer, int tag, const void* data, uint64_t bytes, double timeout) {
  return guarded([&]() -> int64_t {
    auto message = Visit(*group->group)->send(peer, tag, data, bytes);
    if (message->done && !message->failure) return 0;
    return group->keep({std::move(message), Deadline::after(timeout)});
  });
}

int64_t shoal_receive(shoal_group* group, int peer, int tag, void* data, uint64_t bytes, double timeout) {
  return guarded([&] {
    return group->keep({Visit(*group->group)->receive(peer, tag, data, bytes), Deadline::after(timeout)});
  });
}

int shoal_wait(shoal_group* group, int64_t ticket, double limit, double* finished) {
  return static_cast<int>(interruptible([&] {
    const Visit visit(*group->group);
    const auto [what, deadline] = group->find(ticket);
    const auto until = limit >= 0 ? std::optional(Deadline::after(limit)) : std::nullopt;
    if (const auto* task = std::get_if<std::shared_ptr<Task>>(&what)) {
      if (!visit->wait(**task, until)) {
        throw Failure(Code::unfinished, -1, "it is not complete in the time given");
      }
      if (finished != nullptr) *finished = (*task)->finished;
      return 0;
    }
    Message& message = *std::get<std::shared_ptr<Message>>(what);
    if (!visit->wait(message, deadline, until)) {
      throw Failure(Code::unfinished, message.peer, "it is not complete in the time given");
    }
    if (finished != nullptr) *finished = message.finished;
    return std::max(message.sender, 0);
  }));
}

int shoal_test(shoal_group* group, int64_t ticket) {
  return static_cast<int>(guarded([&] {
    if (group->group->is_forked()) return 0;
    return std::visit([](const auto& begun) { return begun->done.load() ? 1 : 0; }, group->find(ticket).what);
  }));
}

void shoal_forget(shoal_group* group, int64_t ticket) {
  if (!group->group->is_forked()) group->forget(ticket);
}

void shoal_raise(void) { take_interruption(); }

struct shoal_aggregator {
  Aggregator aggregator;
};

shoal_aggregator* shoal_aggregator_create(const char* address_and_port, const char* secret) {
  shoal_aggregator* made = nullptr;
  guarded([&] {
    const auto report = [](const std::string& what) { std::fprintf(stderr, "shoal: %s\n", what.c_str()); };
    made = new shoal_aggregator{{address_and_port, secret_at(secret), report}};
    return 0;
  });
  return made;
}

int shoal_aggregator_address(const shoal_aggregator* aggregator, char* text, size_t capacity) {
  return static_cast<int>(guarded([&] { return hand_out(aggregator->aggregator.address(), text, capacity); }));
}

int shoal_aggregator_serve(shoal_aggregator* aggregator) {
  return static_cast<int>(interruptible([&] {
    aggregator->aggregator.serve();
    return 0;
  }));
}

void shoal_aggregator_free(shoal_aggregator* aggregator) { delete aggregator; }

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

int64_t shoal_buffer_trim(void) {
  return guarded([&] { return static_cast<int64_t>(shared_buffers().trim()); });
}

int64_t shoal_encode(int kind, uint64_t number, uint64_t seed, const float* values, uint64_t count, void* payload,
                     uint64_t capacity, float* residual) {
  return guarded([&] {
    const Codec codec{static_cast<CodecKind>(kind), number, seed};
    return static_cast<int64_t>(encode(codec, values, count, payload, capacity, residual));
  });
}

int shoal_decode(int kind, uint64_t number, uint64_t seed, const void* payload, uint64_t bytes, float* out,
                 uint64_t count) {
  return static_cast<int>(guarded([&] {
    decode({static_cast<CodecKind>(kind), number, seed}, payload, bytes, out, count);
    return 0;
  }));
}

int shoal_decode_add(int kind, uint64_t number, uint64_t seed, const void* payload, uint64_t bytes, float* out,
                     uint64_t count, float factor) {
  return static_cast<int>(guarded([&] {
    decode_add({static_cast<CodecKind>(kind), number, seed}, payload, bytes, out, count, factor);
    return 0;
  }));
}

#if !defined(SHOAL_BUILD)
#define SHOAL_BUILD "by hand"  // not built by setup.py, which hashes the sources
#endif
uint64_t shoal_one_shot_bytes(void) { return one_shot_bytes; }

uint64_t shoal_eager_bytes(void) { return Mailbox::eager_here; }

const char* shoal_build(void) { return SHOAL_BUILD; }

const char* shoal_vector_unit(void) { return vector_unit(); }

int shoal_force_vector_unit(const char* name) { return force_vector_unit(name) ? 1 : 0; }

int shoal_combine(int dtype, int reduction, void* output, const void* const* inputs, int count_of_inputs,
                  uint64_t count, int divisor) {
  return static_cast<int>(guarded([&] {
    const auto type = static_cast<Dtype>(dtype);
    combine(type, static_cast<Reduction>(reduction), output, inputs, count_of_inputs, count, divisor);
    return 0;
  }));
}

double shoal_flag_latency(int core, int other) { return flag_latency(core, other); }
