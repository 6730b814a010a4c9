#include "transport/board.h"

#include <sys/uio.h>
#include <unistd.h>

#include <istream>
#include <new>
#include <ostream>
#include <string>

#include "common/error.h"
#include "transport/awaited_boards.h"
#include "transport/process.h"

namespace shoal {

namespace {
constexpr uint64_t known_number = 0x73686f616c213f21;
}

std::ostream& operator<<(std::ostream& text, const Introduction& introduction) {
  const SegmentIdentity& segment = introduction.segment;
  return text << introduction.pid << ' ' << introduction.descriptor << ' ' << segment.inode << ' ' << segment.bytes
              << ' ' << segment.cookie << ' ' << introduction.started << ' ' << introduction.cookie_address;
}

std::istream& operator>>(std::istream& text, Introduction& introduction) {
  SegmentIdentity& segment = introduction.segment;
  return text >> introduction.pid >> introduction.descriptor >> segment.inode >> segment.bytes >> segment.cookie >>
         introduction.started >> introduction.cookie_address;
}

Board::Board(int size, uint32_t first_tick)
    : size_(size), tick_(first_tick), settled_(first_tick), segments_(1) {
  AwaitedBoards::instance().give_back();
  segments_[0] = Segment::create(segment_bytes());
  Front* front = new (segments_[0].data()) Front;
  front->flag.value.store(first_tick, std::memory_order_relaxed);
  front->cookie = known_number;
  front->cores = find_cores();
}

Board::~Board() {
  AwaitedBoards::instance().give_back();
  if (peers_.empty() || front(index_).attached.load(std::memory_order_acquire) == size_ - 1) return;
  std::vector<pid_t> processes;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != index_) processes.push_back(peers_[peer].pid);
  }
  AwaitedBoards::instance().keep(std::move(segments_[index_]), std::move(processes));
}

Introduction Board::introduce() const {
  return {getpid(), segments_[0].descriptor(), segments_[0].identity(), start_time_of(getpid()),
          reinterpret_cast<uint64_t>(&front(0).cookie)};
}

void Board::attach(int index, const std::vector<Introduction>& peers, const std::vector<int>& ranks) {
  std::vector<Segment> segments(size_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == index) continue;
    const Introduction& shown = peers[peer];
    if (shown.segment.bytes != segment_bytes()) {
      const std::string who = "rank " + std::to_string(ranks[peer]);
      throw Failure(Code::mismatch, ranks[peer], who + " shows a board of another size");
    }
    segments[peer] = Segment::attach(shown.pid, shown.descriptor, shown.segment, ranks[peer]);
  }
  segments[index] = std::move(segments_[0]);
  segments_ = std::move(segments);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != index) front(peer).attached.fetch_add(1, std::memory_order_release);
  }
  index_ = index;
  peers_ = peers;
  ranks_ = ranks;
}

std::vector<Cores> Board::cores() const {
  std::vector<Cores> cores;
  for (int index = 0; index < size_; ++index) cores.push_back(front(index).cores);
  return cores;
}

bool Board::can_read_peers() const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == index_) continue;
    uint64_t cookie = 0;
    iovec here{&cookie, sizeof cookie};
    iovec there{reinterpret_cast<void*>(peers_[peer].cookie_address), sizeof cookie};
    const ssize_t got = process_vm_readv(peers_[peer].pid, &here, 1, &there, 1, 0);
    if (got != sizeof cookie || cookie != known_number) return false;
  }
  return true;
}

Ring& Board::ring(int channel, int from, int to) const {
  std::byte* rings = segments_[from].data() + 4096 + 2 * slot_bytes;
  return *reinterpret_cast<Ring*>(rings + sizeof(Ring) * (channel * size_ + to));
}

void Board::prepare(const Patience& patience, const Alarm& alarm, const Deadline& deadline) {
  if (settled_ != tick_) await_all(patience, alarm, deadline);
}

bool Board::all_published() {
  for (int peer = 0; peer < size_; ++peer) {
    if (!has_reached(front(peer).flag.value.load(std::memory_order_acquire))) return false;
  }
  for (int peer = 0; peer < size_; ++peer) compare_calls(peer);
  settled_ = tick_;
  return true;
}

void Board::await_all(const Patience& patience, const Alarm& alarm, const Deadline& deadline) {
  // The next rank first: not all look at the same flag.
  for (int step = 1; step < size_; ++step) await((index_ + step) % size_, patience, alarm, deadline);
  settled_ = tick_;
}

void Board::await(int index, const Patience& patience, const Alarm& alarm, const Deadline& deadline) const {
  const auto is_there = [this](uint32_t value) { return has_reached(value); };
  patience.await(front(index).flag, is_there, alarm, deadline, ranks_[index]);
  compare_calls(index);
}

void Board::refuse_call(int index) const {
  const auto called = [this](int local) { return Call(front(local).flag.words[tick_ & 1]).text(); };
  const std::string peer = std::to_string(ranks_[index]), self = std::to_string(ranks_[index_]);
  throw Failure(Code::mismatch, ranks_[index],
                "rank " + peer + " called " + called(index) + " where rank " + self + " called " + called(index_));
}

void Board::wake_sleepers() {
  for (const Segment& segment : segments_) {
    auto& front = *reinterpret_cast<Front*>(segment.data());
    front.flag.wake();
    front.doorbell.wake();
  }
}

size_t Board::segment_bytes() const { return 4096 + 2 * slot_bytes + sizeof(Ring) * channels * size_; }

}  // namespace shoal
