// The bytes of a peer on another host, against a mailbox that has receives and sends posted.
//
// A peer has proved that it knows the group's secret, and may still send anything. Whatever comes, the mailbox must
// keep within its messages' memory, and end each message or fail it by a Failure.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "algorithms/mailbox.h"
#include "common/reduce.h"
#include "tests/memory_links.h"
#include "transport/shared_buffers.h"

using namespace shoal;
using namespace shoal::testing;

// The fuzzer is built without the arithmetic of vector units, whose copy reads from peers use. None is read here.
void shoal::copy_streaming(void* out, const void* in, size_t bytes) { std::memcpy(out, in, bytes); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static SharedBuffers shared_buffers;
  constexpr Patience patience{.spins = 1, .yields = 1};
  constexpr size_t room = 4096;
  MemoryNetwork network(2, 1 << 20);
  Alarm alarm;
  Mailbox mailbox({.size = 2,
                   .links = network.of(0),
                   .doorbell = nullptr,
                   .shared_buffers = shared_buffers,
                   .can_read_peers = false,
                   .is_here = [](int) { return false; },
                   .is_open = [](int) { return true; },
                   .read = [](int, const Notice&, size_t, size_t, void*) { std::abort(); },
                   .note = [](const void*, size_t) {}},
                  alarm);
  network.of(1).to(0, Deadline::after(1)).send(data, size);
  std::vector<std::byte> small(16), large(room), sent(Mailbox::eager_elsewhere + 1);
  const auto first = mailbox.receive(1, 0, small.data(), small.size());
  const auto second = mailbox.receive(1, 1, large.data(), large.size());
  const auto outward = mailbox.send(1, 2, sent.data(), sent.size());
  for (const auto& message : {first, second, outward}) {
    try {
      mailbox.wait_until(*message, patience, Deadline::after(0.0002));
    } catch (const Failure&) {
    }
  }
  mailbox.close([&] { return alarm.raise(Code::aborted, -1, "the end of an input"); });
  mailbox.settle();
  return 0;
}
