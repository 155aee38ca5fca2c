// Threads that share a step's work with the caller. See pool.cpp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>

namespace df {

// Calls run(i) for i in [0, count), on the caller and on whichever helpers are awake. Which thread runs what
// is not fixed, so run(i) must not depend on it.
void parallel(int count, const std::function<void(int)>& run);

int threads();

// for loops that wait for another core
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Calls run(row) for each row; rows are cheap, so they are shared out in chunks that are worth a claim.
inline void over_rows(int64_t rows, int64_t row_values, const std::function<void(int64_t)>& run) {
    const int64_t per_chunk = std::max<int64_t>(1, 16384 / std::max<int64_t>(row_values, 1));
    parallel((int)((rows + per_chunk - 1) / per_chunk), [&](int chunk) {
        const int64_t end = std::min<int64_t>(rows, (chunk + 1) * per_chunk);
        for (int64_t row = chunk * per_chunk; row < end; row++) run(row);
    });
}

}  // namespace df
