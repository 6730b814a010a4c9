// The messages of a rank that their receivers know of and have not received yet: offered, to be read in place, or
// announced, to be sent when they are wanted.
//
// Ownership of the bytes: the application owns the bytes of an incomplete send, in place, and must not touch them until
// the send is complete or has failed. A send that is complete at once has a copy in a shared buffer, which belongs to
// these offers. The copy may be used for something else only after its receiver says that it has taken it: not when the
// group is closed, and not when the receiver is gone. Copies that are left when the offers are destroyed are discarded:
// their pages are freed when the last process unmaps them, and are never used for anything else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "algorithms/message.h"
#include "transport/shared_buffers.h"

namespace shoal {

struct Offer {
  int peer;
  std::shared_ptr<Message> message;  // done when the receiver has its bytes; null: already done, as there is a copy
  const std::byte* data;             // the copy, or the application's
  size_t bytes;
  void* copy = nullptr;
  size_t sent = 0;  // of an announced message
};

class Offers {
 public:
  static constexpr size_t largest_copy = 2 * 1024 * 1024;
  static constexpr size_t most_copied_bytes = 32 * 1024 * 1024;  // of copies that no receiver has taken yet
  static constexpr int most_copies = 128;                        // each has a descriptor

  explicit Offers(SharedBuffers& shared_buffers) : shared_buffers_(shared_buffers) {}
  ~Offers();
  Offers(const Offers&) = delete;

  // A copy of a message, to add as an offer or give back; null if it is too large, or there are too many. From any
  // thread.
  void* copy(const void* data, size_t bytes);
  void give_back(void* copy, size_t bytes);

  // --- with the mailbox's lock held ---

  uint64_t add(Offer offer);         // its number
  Offer* find(uint64_t number);      // null: there is none
  void remove(uint64_t number);      // its receiver has got it
  bool has_any_for(int peer) const;

  // Removes offers without a copy, whose sends have failed.
  void remove_uncopied();

  template <class Visit>
  void for_each(const Visit& visit) {
    for (auto& [number, offer] : offers_) visit(offer);
  }

 private:
  SharedBuffers& shared_buffers_;
  std::map<uint64_t, Offer> offers_;
  uint64_t next_number_ = 0;
  std::atomic<size_t> copied_bytes_{0};
  std::atomic<int> copies_{0};
};

}  // namespace shoal
