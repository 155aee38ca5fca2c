// Mixture of experts: routing, products of tokens with the weights of their experts, and the weighted sum.
//
// A token meets C experts. The pairs token·C + choice, in order of experts, lie side by side, so that an expert's
// weights pass once for all its tokens. A token's result depends on nothing but the token: see linear/panels.h;
// its choices are added in order of choice.
#include "../cpu/entry.h"
#include "../linear/panels.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace df {
namespace {

// panels that one claim of work covers: a multiple of the widest tile
constexpr int64_t kStep = 24;

// The C largest of E logits, the lower index first among equals, and their softmax over all E.
void choose(const float* logits, int64_t E, int64_t C, bool renormalise, float* weights, int32_t* experts) {
    for (int64_t c = 0; c < C; c++) {
        int64_t best = -1;
        for (int64_t e = 0; e < E; e++) {
            if (std::find(experts, experts + c, e) != experts + c) continue;
            if (best < 0 || logits[e] > logits[best]) best = e;
        }
        experts[c] = (int32_t)best;
    }
    const float peak = logits[experts[0]];
    float total = 0.0f;
    for (int64_t e = 0; e < E; e++) total += std::exp(logits[e] - peak);
    float chosen = 0.0f;
    for (int64_t c = 0; c < C; c++) chosen += weights[c] = std::exp(logits[experts[c]] - peak) / total;
    for (int64_t c = 0; renormalise && c < C; c++) weights[c] /= chosen;
}

}  // namespace
}  // namespace df

// logits [T][E] -> weights, experts [T][C]; order [T·C]: pairs by expert, then by token; places: its inverse;
// offsets [E+1]: where each expert's pairs begin.
extern "C" void df_route(const float* logits, float* weights, int32_t* experts, int32_t* order, int32_t* places,
                         int32_t* offsets, int64_t T, int64_t E, int64_t C, int renormalise) {
    using namespace df;
    over_rows(T, E * C, [&](int64_t t) {
        choose(logits + t * E, E, C, renormalise, weights + t * C, experts + t * C);
    });
    std::fill(offsets, offsets + E + 1, 0);
    for (int64_t p = 0; p < T * C; p++) offsets[experts[p] + 1]++;
    for (int64_t e = 0; e < E; e++) offsets[e + 1] += offsets[e];
    std::vector<int32_t> next(offsets, offsets + E);
    for (int64_t p = 0; p < T * C; p++) order[places[p] = next[experts[p]]++] = (int32_t)p;
}
DF_RECORDABLE(df_route)

// y [P][N] = x·Wᵀ with each row's own expert's W, rows in order of experts. x [T][K] is read at order[row] / C;
// where order is null, x [P][K] lies in that order already. W: packed panels of one expert after the other;
// scale: fp32 [E][N] where W is int8, null where it is bf16.
extern "C" void df_experts(const uint16_t* x, const int32_t* order, const int32_t* offsets, const void* w,
                           const float* scale, void* y, int64_t N, int64_t K, int64_t E, int64_t C, int fp32_out) {
    using namespace df;
    const int64_t P = offsets[E], pairs = (K + 1) / 2, count = (N + kLanes - 1) / kLanes;
    static thread_local std::vector<float> widened;
    widened.resize(P * pairs * 2);
    float* wide = widened.data();
    over_rows(P, K, [&](int64_t p) {
        widen_row(x + (order ? order[p] / C : p) * K, K, wide + p * pairs * 2);
    });
    static thread_local std::vector<int32_t> busy;
    busy.clear();
    for (int64_t e = 0; e < E; e++)
        if (offsets[e] < offsets[e + 1]) busy.push_back((int32_t)e);
    const int64_t steps = (count + kStep - 1) / kStep;
    const int64_t expert_bytes = count * pairs * 32 * (scale ? 1 : 2);
    const int32_t* experts = busy.data();
    parallel((int)(steps * busy.size()), [&](int task) {
        const int64_t e = experts[task / steps], row = offsets[e];
        Problem p{wide + row * pairs * 2, (const char*)w + e * expert_bytes, scale ? scale + e * N : nullptr,
                  nullptr, nullptr, nullptr, offsets[e + 1] - row, N, pairs};
        if (fp32_out) p.y32 = (float*)y + row * N;
        else p.y16 = (bf16*)y + row * N;
        const int64_t first = task % steps * kStep, end = std::min<int64_t>(count, first + kStep);
        if (scale) range<Int8>(p, first, end);
        else range<Bf16>(p, first, end);
    });
}
DF_RECORDABLE(df_experts)

// residual [T][D] += the sum over a token's choices of weight · y, y [P][D] in order of experts. D % 16 == 0.
extern "C" void df_combine(const float* y, const int32_t* places, const float* weights, float* residual, int64_t T,
                           int64_t D, int64_t C) {
    using namespace df;
    over_rows(T, D * C, [&](int64_t t) {
        for (int64_t d = 0; d < D; d += kLanes) {
            f32x16 sum = {};
            for (int64_t c = 0; c < C; c++)
                sum = fma(load<f32x16>(y + places[t * C + c] * D + d), splat(weights[t * C + c]), sum);
            store(residual + t * D + d, load<f32x16>(residual + t * D + d) + sum);
        }
    });
}
DF_RECORDABLE(df_combine)
