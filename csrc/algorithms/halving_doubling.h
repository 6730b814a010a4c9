// Recursive halving (reduce-scatter), recursive doubling (all-gather) and both (all-reduce), in ceil(log2 n)
// rounds each, for any number of ranks.
//
// Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH (2005), for
// powers of two; Träff: Optimal, non-pipelined reduce-scatter and allreduce algorithms (2024,
// arXiv:2410.14234) and Bruck et al.: Efficient algorithms for all-to-all communications (1997), for any
// number.
#pragma once

#include "algorithms/schedule.h"

namespace shoal {

// In place in the output.
Schedule halving_doubling_all_reduce(int rank, int size, size_t bytes, size_t element);

// `bytes` per rank; the output holds size * bytes.
Schedule recursive_doubling_all_gather(int rank, int size, size_t bytes);

// The input holds size * bytes, the output `bytes`. Scratch: floor(size / 2) * bytes.
Schedule recursive_halving_reduce_scatter(int rank, int size, size_t bytes);

}  // namespace shoal
