// The functions that Python calls. Plain C: every function catches all exceptions; a negative result is the negative of
// a Code, and `shoal_last_failure` has the rank and the text, for the calling thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct shoal_group shoal_group;
typedef struct shoal_aggregator shoal_aggregator;

// The numbers of collectives, algorithms, types and reductions are those of algorithms/operation.h and
// common/types.h.
typedef struct {
  int32_t collective, algorithm, dtype, reduction, root, asynchronous;
  const void* input;
  void* output;
  uint64_t bytes;
  const uint64_t* send_bytes;     // all-to-all only: one for each rank
  const uint64_t* receive_bytes;
  double timeout;                 // seconds
  const uint64_t* stripes;        // offset and bytes of a part, of each stripe; `bytes` is then the buffer's. Or null
  uint64_t stripe_count;
} shoal_call;

int shoal_last_failure(int* rank, char* text, size_t capacity);

// --- groups ---
// A secret is 32 bytes. `aggregator_secret`: null if the aggregator asks for none.
shoal_group* shoal_group_create(int rank, int size, const int* hosts, const char* bind_address, int streams,
                                double heartbeat, const char* aggregator, const char* aggregator_secret);
// Lets these processes read this process's memory, where the system needs to know them. Call it before any rank joins.
int shoal_group_allow_reads(shoal_group* group, const int* peers, int count);
int shoal_group_introduce(shoal_group* group, char* text, size_t capacity);
// How this rank reaches its peers' memory: a Reach (group.h).
int shoal_group_join(shoal_group* group, const char* const* introductions, const char* secret,
                     double timeout);
// Returns how many ranks of this host take turns on a core: 1 if each has its own core.
int shoal_group_start(shoal_group* group, int can_read_peers);
int shoal_group_abort(shoal_group* group, const char* text);
// 0 while the group works; otherwise the reason why it does not.
int shoal_group_check(shoal_group* group);
// Leaves the group: all waits of this process end, and all later calls on the group fail. Complete sends are delivered
// before it returns. Within a signal handler that interrupts a wait, the group is ended when it returns, and leaves
// when the wait does. In a forked process it does nothing.
void shoal_group_close(shoal_group* group);
// Closes the group, and frees its memory.
void shoal_group_free(shoal_group* group);

// --- operations: 0 if done; positive: a ticket to wait with ---
int64_t shoal_begin(shoal_group* group, const shoal_call* call);
// A message that is not done `timeout` seconds from now ends the group.
int64_t shoal_send(shoal_group* group, int peer, int tag, const void* data, uint64_t bytes, double timeout);
// peer -1: from any rank
int64_t shoal_receive(shoal_group* group, int peer, int tag, void* data, uint64_t bytes, double timeout);
// Returns when the ticket's operation is done; for a receive, returns 0 or the sender's rank. `finished`, unless null,
// gets the time at which it was done, in seconds of the monotonic clock. `limit`: seconds after which it returns the
// negative of `unfinished`, the operation going on; negative: none. Where it returns that of `interrupted`,
// `shoal_raise` raises what a signal handler raised.
int shoal_wait(shoal_group* group, int64_t ticket, double limit, double* finished);
// 1: it is done; 0: not yet.
int shoal_test(shoal_group* group, int64_t ticket);
// The caller will not wait for the operation any more. An unfinished operation goes on.
void shoal_forget(shoal_group* group, int64_t ticket);
// Raises in Python what a signal handler raised during the last call.
void shoal_raise(void);

// --- the aggregator of in-network reduction, a process of its own ---
// Listens on "address:port"; null: it cannot. It tells people what happens on the standard error output.
// `secret`: that callers must know, or null.
shoal_aggregator* shoal_aggregator_create(const char* address_and_port, const char* secret);
int shoal_aggregator_address(const shoal_aggregator* aggregator, char* text, size_t capacity);
// Serves until a signal handler raises: returns the negative of `interrupted`.
int shoal_aggregator_serve(shoal_aggregator* aggregator);
void shoal_aggregator_free(shoal_aggregator* aggregator);

// --- memory that peers on the host can map ---
void* shoal_buffer_allocate(uint64_t bytes);
int shoal_buffer_release(void* data);
// Gives the memory of released buffers back to the system; returns the number of bytes.
int64_t shoal_buffer_trim(void);

// The most bytes that a rank may give in a one-shot collective; and the size from which a message within the host may
// be copied when it is sent.
uint64_t shoal_one_shot_bytes(void);
uint64_t shoal_eager_bytes(void);

// --- codecs: no group is needed ---
// The numbers of kinds are those of codecs/codec.h. Returns the bytes written; `residual` may be null.
int64_t shoal_encode(int kind, uint64_t number, uint64_t seed, const float* values, uint64_t count, void* payload,
                     uint64_t capacity, float* residual);
int shoal_decode(int kind, uint64_t number, uint64_t seed, const void* payload, uint64_t bytes, float* out,
                 uint64_t count);
// out += factor * decoded
int shoal_decode_add(int kind, uint64_t number, uint64_t seed, const void* payload, uint64_t bytes, float* out,
                     uint64_t count, float factor);

// A hash of the sources of the core. Ranks with different hashes may not understand each other.
const char* shoal_build(void);

// --- parts of the core, for tests and benchmarks ---
const char* shoal_vector_unit(void);
int shoal_force_vector_unit(const char* name);
int shoal_combine(int dtype, int reduction, void* output, const void* const* inputs, int count_of_inputs,
                  uint64_t count, int divisor);
// One-way time of a flag between two cores, in nanoseconds; negative where it cannot be measured.
double shoal_flag_latency(int core, int other);

#pragma GCC visibility pop
#if defined(__cplusplus)
}
#endif
