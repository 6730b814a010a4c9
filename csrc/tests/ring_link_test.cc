#include "transport/ring_link.h"

#include <random>

#include "tests/check.h"
#include "tests/host_ranks.h"

using namespace shoal;
using namespace shoal::testing;

namespace {

std::vector<uint8_t> stream_of(int from, int to, size_t bytes) {
  std::mt19937 random(static_cast<unsigned>(from * 100 + to));
  std::vector<uint8_t> stream(bytes);
  for (uint8_t& byte : stream) byte = static_cast<uint8_t>(random());
  return stream;
}

// Every pair of ranks has a stream each way, cut into pieces of random sizes on both sides.
void streams_arrive_whole_and_in_order(int size, size_t bytes, bool may_show) {
  HostRanks ranks(size);
  ranks.run([&](HostRank& rank) {
    std::mt19937 random(static_cast<unsigned>(rank.index));
    std::uniform_int_distribution<size_t> piece(1, 3 * Ring::capacity / 2);
    RingLinks links(rank.board, 0, may_show);
    const auto at = [](int index) { return static_cast<size_t>(index); };
    std::vector<std::vector<uint8_t>> outgoing(at(size)), incoming(at(size));
    std::vector<size_t> sent(at(size)), received(at(size));
    for (int peer = 0; peer < size; ++peer) {
      outgoing[at(peer)] = stream_of(rank.index, peer, bytes);
      incoming[at(peer)].resize(bytes);
    }
    for (size_t moved = 0; moved < 2 * bytes * at(size - 1);) {
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank.index) continue;
        size_t& out = sent[at(peer)];
        size_t& in = received[at(peer)];
        RingLink& link = links.to(peer);
        const size_t wrote = link.send(outgoing[at(peer)].data() + out, std::min(piece(random), bytes - out));
        const size_t read = link.receive(incoming[at(peer)].data() + in, std::min(piece(random), bytes - in));
        out += wrote, in += read, moved += wrote + read;
        if (wrote + read == 0) std::this_thread::yield();
      }
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank.index) CHECK(incoming[at(peer)] == stream_of(peer, rank.index, bytes));
    }
  });
}

void a_full_ring_takes_nothing_until_it_is_read() {
  HostRanks ranks(2);
  RingLinks sender(ranks[0].board, 1, false), receiver(ranks[1].board, 1, false);
  const std::vector<uint8_t> stream = stream_of(0, 1, 2 * Ring::capacity);
  CHECK_EQUAL(sender.to(1).send(stream.data(), stream.size()), Ring::capacity);
  CHECK_EQUAL(sender.to(1).send(stream.data(), 1), 0u);
  std::vector<uint8_t> taken(100);
  CHECK_EQUAL(receiver.to(0).receive(taken.data(), taken.size()), taken.size());
  CHECK_EQUAL(sender.to(1).send(stream.data(), stream.size()), taken.size());
}

void channels_are_apart() {
  HostRanks ranks(2);
  RingLinks collectives(ranks[0].board, 0, false), messages(ranks[1].board, 1, false);
  const char byte = 'x';
  char found = 0;
  CHECK_EQUAL(collectives.to(1).send(&byte, 1), 1u);
  CHECK_EQUAL(messages.to(0).receive(&found, 1), 0u);
}

void each_piece_rings_the_peers_doorbell() {
  HostRanks ranks(2);
  RingLinks sender(ranks[0].board, 0, false), receiver(ranks[1].board, 0, false);
  char byte = 'x';
  sender.to(1).send(&byte, 1);
  CHECK_EQUAL(ranks[1].board.front(1).doorbell.value.load(), 1u);
  CHECK_EQUAL(ranks[0].board.front(0).doorbell.value.load(), 0u);
  receiver.to(0).receive(&byte, 1);
  CHECK_EQUAL(ranks[0].board.front(0).doorbell.value.load(), 1u);
}

}  // namespace

int main() {
  for (const int size : {2, 3}) {
    for (const bool may_show : {false, true}) {
      streams_arrive_whole_and_in_order(size, 5 * Ring::capacity + 17, may_show);
    }
  }
  a_full_ring_takes_nothing_until_it_is_read();
  channels_are_apart();
  each_piece_rings_the_peers_doorbell();
  return report();
}
