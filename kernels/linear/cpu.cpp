// Linear layer in bf16: y = x·Wᵀ (+ bias), accumulated in fp32.
//
// W is packed once into panels of 16 outputs: [N/16][K/2][16][2], so that one 64-byte load brings two
// consecutive inputs of 16 outputs. Each output is one chain of fused multiply-adds over ascending k, whatever
// the number of rows and threads: a row's result depends on nothing but the row.
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <algorithm>
#include <vector>

namespace df {
namespace {

constexpr int kLanes = 16;

struct Problem {
    const float* x;  // [T][pairs * 2]
    const uint32_t* w;  // [panels][pairs][16]
    const bf16* bias;
    bf16* y16;  // one of both is null
    float* y32;
    int64_t T, N, pairs;
};

// ROWS rows against PANELS panels, all accumulators in registers.
template <int ROWS, int PANELS> void tile(const Problem& p, int64_t row, int64_t panel) {
    f32x16 acc[ROWS][PANELS] = {};
    const uint32_t* w = p.w + panel * p.pairs * kLanes;
    const float* x = p.x + row * p.pairs * 2;
    for (int64_t k = 0; k < p.pairs; k++) {
        u32x16 pair[PANELS];
        for (int j = 0; j < PANELS; j++) pair[j] = load<u32x16>(w + (j * p.pairs + k) * kLanes);
        f32x16 column[PANELS];
        for (int j = 0; j < PANELS; j++) column[j] = even(pair[j]);
        for (int i = 0; i < ROWS; i++) {
            const f32x16 xi = splat(x[i * p.pairs * 2 + 2 * k]);
            for (int j = 0; j < PANELS; j++) acc[i][j] = fma(column[j], xi, acc[i][j]);
        }
        for (int j = 0; j < PANELS; j++) column[j] = odd(pair[j]);
        for (int i = 0; i < ROWS; i++) {
            const f32x16 xi = splat(x[i * p.pairs * 2 + 2 * k + 1]);
            for (int j = 0; j < PANELS; j++) acc[i][j] = fma(column[j], xi, acc[i][j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANELS; j++) {
            float out[kLanes];
            store(out, acc[i][j]);
            const int64_t first = (panel + j) * kLanes;
            const int64_t count = std::min<int64_t>(kLanes, p.N - first);
            for (int64_t n = 0; n < count; n++) {
                const float value = out[n] + (p.bias ? to_float(p.bias[first + n]) : 0.0f);
                if (p.y16) p.y16[(row + i) * p.N + first + n] = to_bf16(value);
                else p.y32[(row + i) * p.N + first + n] = value;
            }
        }
}

// All rows against PANELS panels: the panels stay in cache while the rows pass.
template <int PANELS> void panels(const Problem& p, int64_t panel) {
    int64_t row = 0;
    if constexpr (PANELS <= 3)
        for (; row + 8 <= p.T; row += 8) tile<8, PANELS>(p, row, panel);
    if constexpr (PANELS <= 4)
        for (; row + 4 <= p.T; row += 4) tile<4, PANELS>(p, row, panel);
    for (; row + 2 <= p.T; row += 2) tile<2, PANELS>(p, row, panel);
    for (; row < p.T; row++) tile<1, PANELS>(p, row, panel);
}

// Few rows: many panels at once, for enough loads in flight. Many rows: few panels, more rows in registers.
void range(const Problem& p, int64_t panel, int64_t end) {
    if (p.T < 4)
        for (; panel + 8 <= end; panel += 8) panels<8>(p, panel);
    else if (p.T < 8)
        for (; panel + 4 <= end; panel += 4) panels<4>(p, panel);
    for (; panel + 3 <= end; panel += 3) panels<3>(p, panel);
    for (; panel < end; panel++) panels<1>(p, panel);
}

}  // namespace
}  // namespace df

extern "C" void df_pack_linear(const uint16_t* w, int64_t N, int64_t K, uint32_t* packed) {
    const int64_t pairs = (K + 1) / 2, count = (N + 15) / 16;
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t k = 0; k < pairs; k++)
            for (int64_t lane = 0; lane < 16; lane++) {
                const int64_t n = panel * 16 + lane;
                const uint32_t low = n < N ? w[n * K + 2 * k] : 0;
                const uint32_t high = n < N && 2 * k + 1 < K ? w[n * K + 2 * k + 1] : 0;
                packed[(panel * pairs + k) * 16 + lane] = high << 16 | low;
            }
}

extern "C" void df_linear(const uint16_t* x, const uint32_t* w, const uint16_t* bias, void* y, int64_t T,
                          int64_t N, int64_t K, int fp32_out) {
    using namespace df;
    const int64_t pairs = (K + 1) / 2, count = (N + kLanes - 1) / kLanes;
    static thread_local std::vector<float> rows;
    rows.resize(T * pairs * 2);
    float* wide = rows.data();
    for (int64_t t = 0; t < T; t++) {
        float* out = wide + t * pairs * 2;
        int64_t k = 0;
        for (; k + 16 <= K; k += 16) store(out + k, load_bf16(x + t * K + k));
        for (; k < K; k++) out[k] = to_float(x[t * K + k]);
        if (K & 1) out[K] = 0.0f;
    }
    const Problem p{wide, w, bias, fp32_out ? nullptr : (bf16*)y, fp32_out ? (float*)y : nullptr, T, N, pairs};
    // chunks of whole 24-panel groups where there are many, so that no tile is cut short at a border
    const int64_t wanted = (count + threads() * 4 - 1) / (threads() * 4);
    const int64_t step = std::max<int64_t>(8, (wanted + 23) / 24 * 24 > wanted * 2 ? (wanted + 7) / 8 * 8
                                                                                  : (wanted + 23) / 24 * 24);
    const int chunks = (int)((count + step - 1) / step);
    parallel(chunks, [&](int chunk) { range(p, chunk * step, std::min<int64_t>(count, (chunk + 1) * step)); });
}
