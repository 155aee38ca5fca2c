// Threads that share a step's work with the caller. See pool.cpp.
#pragma once
#include <functional>

namespace df {

// Calls run(i) for i in [0, count), on the caller and on whichever helpers are awake. Which thread runs what
// is not fixed, so run(i) must not depend on it.
void parallel(int count, const std::function<void(int)>& run);

int threads();

}  // namespace df
