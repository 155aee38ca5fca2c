// Products of rows with panels of weights: y = x·Wᵀ (+ bias), sums in fp32. What `cpu.cpp` of linear layers and
// of experts share.
//
// W is packed once into panels of 16 outputs, inputs in pairs: [N/16][K/2][16 outputs][2] in bf16, so that one
// load brings two inputs of 16 outputs; [N/16][K/2][2][16 outputs] in int8. Each output is one chain of fused
// multiply-adds over ascending k, whatever the number of rows and threads: a row's result depends on nothing
// but the row.
#pragma once
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <vector>

namespace df {

constexpr int kLanes = 16;
constexpr int kAhead = 24;
// from so many rows on it pays to widen a panel's weights once, rather than again for each tile of rows
constexpr int64_t kManyRows = 96;

// A panel's weights for two consecutive inputs, as floats.
struct Bf16 {
    typedef u32x16 Pair;
    static f32x16 first(const Pair* pair) { return even(load<u32x16>(pair)); }
    static f32x16 second(const Pair* pair) { return odd(load<u32x16>(pair)); }
};

struct Int8 {
    typedef i8x16 Pair[2];
    static f32x16 first(const Pair* pair) { return widen(load<i8x16>(pair)); }
    static f32x16 second(const Pair* pair) { return widen(load<i8x16>((const i8x16*)pair + 1)); }
};

struct Fp32 {
    typedef f32x16 Pair[2];
    static f32x16 first(const Pair* pair) { return load<f32x16>(pair); }
    static f32x16 second(const Pair* pair) { return load<f32x16>((const f32x16*)pair + 1); }
};

struct Problem {
    const float* x;  // [T][pairs * 2]
    const char* w;   // [panels][pairs] of Pair
    const float* scale;  // [N], null for bf16
    const bf16* bias;    // [N] or null
    bf16* y16;           // one of both is null
    float* y32;
    int64_t T, N, pairs;
};

inline void finish(const Problem& p, f32x16 acc, int64_t row, int64_t first) {
    const int64_t at = row * p.N + first;
    if (p.N - first >= kLanes) {
        if (p.scale) acc *= load<f32x16>(p.scale + first);
        if (p.bias) acc += load_bf16(p.bias + first);
        if (p.y16) store_bf16(p.y16 + at, acc);
        else store(p.y32 + at, acc);
        return;
    }
    float out[kLanes];
    store(out, acc);
    for (int64_t n = 0; n < p.N - first; n++) {
        float value = p.scale ? out[n] * p.scale[first + n] : out[n];
        if (p.bias) value += to_float(p.bias[first + n]);
        if (p.y16) p.y16[at + n] = to_bf16(value);
        else p.y32[at + n] = value;
    }
}

// ROWS rows against PANELS panels, all accumulators in registers.
template <class W, int ROWS, int PANELS>
void tile(const Problem& p, const typename W::Pair* w, int64_t row, int64_t panel) {
    f32x16 acc[ROWS][PANELS] = {};
    const float* x = p.x + row * p.pairs * 2;
    for (int64_t k = 0; k < p.pairs; k++) {
        // the hardware fetches too late across so many streams
        for (int j = 0; j < PANELS; j++) __builtin_prefetch(w + j * p.pairs + k + kAhead);
        f32x16 column[PANELS];
        for (int j = 0; j < PANELS; j++) column[j] = W::first(w + j * p.pairs + k);
        for (int i = 0; i < ROWS; i++) {
            const f32x16 xi = splat(x[i * p.pairs * 2 + 2 * k]);
            for (int j = 0; j < PANELS; j++) acc[i][j] = fma(column[j], xi, acc[i][j]);
        }
        for (int j = 0; j < PANELS; j++) column[j] = W::second(w + j * p.pairs + k);
        for (int i = 0; i < ROWS; i++) {
            const f32x16 xi = splat(x[i * p.pairs * 2 + 2 * k + 1]);
            for (int j = 0; j < PANELS; j++) acc[i][j] = fma(column[j], xi, acc[i][j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANELS; j++) finish(p, acc[i][j], row + i, (panel + j) * kLanes);
}

// All rows against PANELS panels: the panels stay in cache while the rows pass.
template <class W, int PANELS> void rows(const Problem& p, const typename W::Pair* w, int64_t panel) {
    int64_t row = 0;
    if constexpr (PANELS <= 3)
        for (; row + 8 <= p.T; row += 8) tile<W, 8, PANELS>(p, w, row, panel);
    if constexpr (PANELS <= 4)
        for (; row + 4 <= p.T; row += 4) tile<W, 4, PANELS>(p, w, row, panel);
    for (; row + 2 <= p.T; row += 2) tile<W, 2, PANELS>(p, w, row, panel);
    for (; row < p.T; row++) tile<W, 1, PANELS>(p, w, row, panel);
}

template <class W, int PANELS> void panels(const Problem& p, int64_t panel) {
    const auto* w = (const typename W::Pair*)p.w + panel * p.pairs;
    if (p.T < kManyRows) return rows<W, PANELS>(p, w, panel);
    static thread_local std::vector<float> wide;
    wide.resize(PANELS * p.pairs * 2 * kLanes);
    for (int64_t i = 0; i < PANELS * p.pairs; i++) {
        store(&wide[i * 2 * kLanes], W::first(w + i));
        store(&wide[(i * 2 + 1) * kLanes], W::second(w + i));
    }
    rows<Fp32, PANELS>(p, (const Fp32::Pair*)wide.data(), panel);
}

// Few rows: many panels at once, for enough loads in flight. Many rows: few panels, more rows in registers.
template <class W> void range(const Problem& p, int64_t panel, int64_t end) {
    if (p.T < 4)
        for (; panel + 8 <= end; panel += 8) panels<W, 8>(p, panel);
    else if (p.T < 8)
        for (; panel + 4 <= end; panel += 4) panels<W, 4>(p, panel);
    for (; panel + 3 <= end; panel += 3) panels<W, 3>(p, panel);
    for (; panel < end; panel++) panels<W, 1>(p, panel);
}

// A row of K numbers as floats, padded to whole pairs.
inline void widen_row(const bf16* x, int64_t K, float* out) {
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) store(out + k, load_bf16(x + k));
    for (; k < K; k++) out[k] = to_float(x[k]);
    if (K & 1) out[K] = 0.0f;
}

}  // namespace df
