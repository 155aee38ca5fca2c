// Entries that Python calls by ctypes, and that a recorded program calls with packed arguments.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

namespace df {

template <class T> T unpacked(uint64_t word) {
    static_assert(sizeof(T) <= sizeof word);
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

template <class R, class... A, size_t... I>
void invoke(R (*entry)(A...), const uint64_t* words, std::index_sequence<I...>) {
    entry(unpacked<A>(words[I])...);
}

template <class R, class... A> void invoke(R (*entry)(A...), const uint64_t* words) {
    invoke(entry, words, std::index_sequence_for<A...>());
}

}  // namespace df

// Behind an entry's definition: its twin, which takes one 64-bit word per argument, low bytes first.
#define DF_RECORDABLE(entry) \
    extern "C" void entry##_packed(const uint64_t* words) { df::invoke(entry, words); }
