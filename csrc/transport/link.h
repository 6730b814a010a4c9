// One ordered stream of bytes each way between this rank and one peer, whatever carries it.
//
// Both ends know how many bytes will come, so there is no framing. A Link is used by one thread at a time.
#pragma once

#include <poll.h>

#include <cstddef>
#include <string>
#include <vector>

#include "common/deadline.h"

namespace shoal {

class Link {
 public:
  virtual ~Link() = default;

  // Takes up to `size` bytes without waiting; returns how many, 0 if there is no room now.
  // Throws Failure(Code::peer_lost) if the peer is gone.
  virtual size_t send(const void* data, size_t size) = 0;

  // Gives up to `size` bytes without waiting; returns how many, 0 if nothing has come.
  virtual size_t receive(void* data, size_t size) = 0;

  // Appends the descriptors to poll until send (receive) can do something. False: nothing to poll, look again instead
  // (a link through shared memory).
  virtual bool append_poll(std::vector<pollfd>& fds, bool sending, bool receiving) = 0;

  // Whether the peer has received all that was sent; false where this end cannot tell.
  virtual bool is_drained() const { return false; }
};

// The links of one rank to its peers, made on first use.
class Links {
 public:
  virtual ~Links() = default;

  // The link to `peer`. May wait until the peer uses it too; throws Failure (timeout, peer_lost, aborted).
  virtual Link& to(int peer, Deadline deadline) = 0;

  // Begins to make the link to `peer`, if there is none; does not wait.
  virtual void request(int) {}

  // The link to `peer`, or null while there is none: also a link that the peer asked for.
  virtual Link* find(int peer) = 0;

  // The rank of `peer` in the group, for errors: a different number if the links connect only a part of the group.
  virtual int rank_of(int peer) const { return peer; }

  // As `rank_of`, as a text; peers that are no ranks have another name.
  virtual std::string name_of(int peer) const { return std::to_string(rank_of(peer)); }
};

}  // namespace shoal
