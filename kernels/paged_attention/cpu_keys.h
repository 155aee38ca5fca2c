// Stored keys and values as floats: what a block's bytes mean, and a tile of it laid out for products.
#pragma once
#include "../cpu/simd.h"

#include <type_traits>

namespace df {

constexpr int kBlock = 16;

// A format widens 16 numbers side by side, or one of those that each 32-bit word holds (the lowest first).
// Scales of quantised numbers are the caller's.
struct Bf16 {
    static constexpr int kPerWord = 2;
    static f32x16 numbers(const char* p) { return load_bf16((const bf16*)p); }
    template <int I> static f32x16 part(u32x16 words) { return I ? odd(words) : even(words); }
};

struct Int8 {
    static constexpr int kPerWord = 4;
    static f32x16 numbers(const char* p) { return widen(load<i8x16>(p)); }
    template <int I> static f32x16 part(u32x16 words) {
        return __builtin_convertvector((i32x16)(words << (24 - 8 * I)) >> 24, f32x16);
    }
};

// e4m3 read as the top bits of an fp32 is too small by the difference of the exponents' biases, 127 - 7
struct Fp8 {
    static constexpr int kPerWord = 4;
    static f32x16 numbers(const char* p) {
        return value(integers(load<i8x16>(p)) << 20);
    }
    template <int I> static f32x16 part(u32x16 words) { return value((i32x16)(words << (24 - 8 * I)) >> 4); }
    static f32x16 value(i32x16 shifted) { return (f32x16)(shifted & (int32_t)0x87f00000) * 0x1p120f; }
};

// Of each 2·H × 2·H block the off-diagonal H × H blocks change places; done for all H it transposes.
template <int H> static inline void exchange(u32x16* rows) {
    i32x16 upper, lower;
    for (int lane = 0; lane < 16; lane++) {
        upper[lane] = lane & H ? 16 + lane - H : lane;
        lower[lane] = lane & H ? 16 + lane : lane + H;
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i & H) continue;
        const u32x16 a = rows[i], b = rows[i + H];
        rows[i] = __builtin_shuffle(a, b, upper);
        rows[i + H] = __builtin_shuffle(a, b, lower);
    }
}

static inline void transpose(u32x16* rows) {
    exchange<8>(rows);
    exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
}

// The first `words` of 16 words from each of 16 rows of keys, transposed; k: a lane per key, `stride` apart.
template <class F, int WORDS>
static inline void spread_words(const char* keys, const char* next, int64_t row_bytes, float* k,
                                int64_t stride) {
    u32x16 columns[kBlock];
#pragma GCC unroll 16
    for (int t = 0; t < kBlock; t++) {
        __builtin_prefetch(next + t * row_bytes);
        if constexpr (WORDS == 16) columns[t] = load<u32x16>(keys + t * row_bytes);
        else std::memcpy(&(columns[t] = u32x16{}), keys + t * row_bytes, WORDS * 4);
    }
    transpose(columns);
#pragma GCC unroll 16
    for (int w = 0; w < WORDS; w++) {
        float* out = k + w * F::kPerWord * stride;
        store(out, F::template part<0>(columns[w]));
        store(out + stride, F::template part<1>(columns[w]));
        if constexpr (F::kPerWord == 4) {
            store(out + 2 * stride, F::template part<2>(columns[w]));
            store(out + 3 * stride, F::template part<3>(columns[w]));
        }
    }
}

// k: [D][stride], from keys [16][D]; next: what will be wanted then, fetched line by line. D % 16 == 0.
template <class F> void spread_keys(const char* keys, const char* next, int64_t D, float* k, int64_t stride) {
    const int64_t row_bytes = D * 4 / F::kPerWord;
    int64_t d = 0;
    const auto step = [&](auto words) {
        constexpr int count = decltype(words)::value;
        const int64_t at = d * 4 / F::kPerWord;
        spread_words<F, count>(keys + at, next + at, row_bytes, k + d * stride, stride);
        d += count * F::kPerWord;
    };
    while (d + 16 * F::kPerWord <= D) step(std::integral_constant<int, 16>());
    if (d + 8 * F::kPerWord <= D) step(std::integral_constant<int, 8>());
    if (d < D) step(std::integral_constant<int, 4>());
}

// v: [16][D], from values of the same shape
template <class F> void spread_values(const char* values, const char* next, int64_t D, float* v) {
    constexpr int bytes = 4 / F::kPerWord;
    for (int64_t i = 0; i < kBlock * D; i += 16) {
        if (i * bytes % 64 == 0) __builtin_prefetch(next + i * bytes);
        store(v + i, F::numbers(values + i * bytes));
    }
}

}  // namespace df
