// What Python calls. Plain C: every function catches what is thrown below it; a negative result is the
// negative of a Code, and `shoal_last_failure` has the rank and the text, for the thread that called.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef struct shoal_group shoal_group;

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
shoal_group* shoal_group_create(int rank, int size, const int* hosts, const char* bind_address, int streams,
                                double heartbeat);
// Lets these processes read this one's memory, where the system has to be told. Before anyone joins.
int shoal_group_allow_reads(shoal_group* group, const int* peers, int count);
int shoal_group_introduce(shoal_group* group, char* text, size_t capacity);
// How this rank reaches its peers' memory: a Reach (group.h).
int shoal_group_join(shoal_group* group, const char* const* introductions, const char* secret,
                     double timeout);
// How many ranks of this host take turns on a core: 1 if each has one of its own.
int shoal_group_start(shoal_group* group, int can_read_peers);
int shoal_group_abort(shoal_group* group, const char* text);
// 0 while the group works; otherwise why it does not.
int shoal_group_check(shoal_group* group);
// Leaves the group: whoever of this process waits is freed, and whatever is called on it fails from now on. Sends that
// are complete are delivered before it returns. Within a signal handler that interrupts a wait, the group is ended when
// it returns, and leaves when the wait does. In a process that was forked off it does nothing.
void shoal_group_close(shoal_group* group);
// Closes it, and takes its memory back.
void shoal_group_free(shoal_group* group);

// --- operations: 0, it is done; positive, a ticket to wait with ---
int64_t shoal_begin(shoal_group* group, const shoal_call* call);
// A message that is not done `timeout` seconds from now ends the group.
int64_t shoal_send(shoal_group* group, int peer, int tag, const void* data, uint64_t bytes, double timeout);
// peer -1: from anyone
int64_t shoal_receive(shoal_group* group, int peer, int tag, void* data, uint64_t bytes, double timeout);
// Returns once the ticket's operation is done; of a receive, 0 or the sender's rank. `finished`, unless
// null, gets the moment at which it was, in seconds of the monotonic clock. `limit`: seconds after which it returns the
// negative of `unfinished`, the operation going on; negative: none. Where it returns that of `interrupted`,
// `shoal_raise` raises what a signal handler raised.
int shoal_wait(shoal_group* group, int64_t ticket, double limit, double* finished);
// 1: it is done; 0: not yet.
int shoal_test(shoal_group* group, int64_t ticket);
// The operation will not be waited for any more. What is not done goes on.
void shoal_forget(shoal_group* group, int64_t ticket);
// Raises in Python what a signal handler raised during the last call.
void shoal_raise(void);

// --- memory that peers on the host can map ---
void* shoal_buffer_allocate(uint64_t bytes);
int shoal_buffer_release(void* data);
// Gives the memory of those that were released back to the system; how many bytes.
int64_t shoal_buffer_trim(void);

// What one rank may give in a collective by one-shot, at most; and the size from which on a message to the host may be
// copied when it is sent.
uint64_t shoal_one_shot_bytes(void);
uint64_t shoal_eager_bytes(void);

// What the core was built from: a hash of its sources. Ranks with different ones may not understand each other.
const char* shoal_build(void);

// --- what the core is made of, for tests and benchmarks ---
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
