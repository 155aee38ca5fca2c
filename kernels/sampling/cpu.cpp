// Sampling on CPU: temperature, top-k, top-p, min-p and Gumbel noise, one pass over a row where it can be.
//
// The same choice as reference.py makes, without sorting the vocabulary: top-k by selection; top-p by sorting
// only tokens of probability at least (1 - p) / V, since all others together do not reach 1 - p.
#include "../cpu/entry.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace df {
namespace {

constexpr uint32_t kWeyl = 0x9E3779B9u, kMix1 = 0x7FEB352Du, kMix2 = 0x846CA68Bu;

// one number, or sixteen
template <class T> inline T mix(T x) {
    x ^= x >> 16;
    x *= kMix1;
    x ^= x >> 15;
    x *= kMix2;
    return x ^ (x >> 16);
}

// Natural logarithm of positive normal floats (Cephes logf): within 2 ulp.
f32x16 log16(f32x16 x) {
    i32x16 bits = (i32x16)x;
    const i32x16 exponent = ((bits - 0x3f3504f3) >> 23);
    const f32x16 m = (f32x16)(bits - (exponent << 23)) - 1.0f;
    const f32x16 e = __builtin_convertvector(exponent, f32x16);
    f32x16 p = splat(7.0376836292e-2f);
    for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                    2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        p = fma(p, m, splat(c));
    const f32x16 square = m * m;
    f32x16 y = p * m * square;
    y = fma(e, splat(-2.12194440e-4f), y);
    y = fma(square, splat(-0.5f), y);
    return fma(e, splat(0.693359375f), m + y);
}

// Standard Gumbel noise of sixteen tokens; see reference.py.
f32x16 gumbel(u32x16 tokens, uint32_t first, uint32_t second) {
    const u32x16 bits = mix(mix(tokens * kWeyl + first) ^ second);
    f32x16 u = (__builtin_convertvector(bits, f32x16) + 0.5f) * 0x1p-32f;
    const f32x16 most = splat(1.0f - 0x1p-24f);
    u = u > most ? most : u;
    // log1p(-u): the quotient repairs what 1 - u loses
    const f32x16 rest = 1.0f - u;
    const f32x16 lost = 1.0f - rest;
    const f32x16 exponential = rest == 1.0f ? u : -log16(rest) * (u / lost);
    return -log16(exponential);
}

struct Row {
    const float* logits;
    int64_t V;
    float temperature, top_p, min_p;
    int64_t top_k;
    uint32_t first, second;
};

const u32x16 kLaneIds = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Of the lanes' best: the token of the highest score, the first of equals.
int64_t first_best(f32x16 highest, u32x16 where) {
    int winner = 0;
    for (int i = 1; i < 16; i++) {
        const bool better = highest[i] > highest[winner];
        if (better || (highest[i] == highest[winner] && where[i] < where[winner])) winner = i;
    }
    return where[winner];
}

int64_t argmax(const float* x, int64_t n) {
    f32x16 highest = splat(-INFINITY);
    u32x16 where = kLaneIds;
    int64_t v = 0;
    for (; v + 16 <= n; v += 16) {
        const f32x16 score = load<f32x16>(x + v);
        where = score > highest ? kLaneIds + (uint32_t)v : where;
        highest = max16(score, highest);
    }
    for (; v < n; v++)
        if (x[v] > highest[v % 16]) highest[v % 16] = x[v], where[v % 16] = (uint32_t)v;
    return first_best(highest, where);
}

// The least tempered logit that the filters keep.
float floor_of(const Row& row, const std::vector<float>& z, float best, std::vector<float>& scratch) {
    float floor = -INFINITY;
    if (row.top_k > 0 && row.top_k < row.V) {
        scratch.assign(z.begin(), z.begin() + row.V);
        std::nth_element(scratch.begin(), scratch.begin() + (row.top_k - 1), scratch.end(), std::greater<float>());
        floor = scratch[row.top_k - 1];
    }
    if (row.top_p < 1.0f) {
        double total = 0.0;
        for (int64_t v = 0; v < row.V; v += 16) {
            const f32x16 x = load<f32x16>(&z[v]);
            total += sum16((f32x16)((i32x16)exp16(x - best) & (x >= floor)));
        }
        const double least = (1.0 - (double)row.top_p) / (double)row.V * total;
        const float cut = std::max(floor, least > 0 ? best + (float)std::log(least) - 1e-3f : -INFINITY);
        scratch.clear();
        for (int64_t v = 0; v < row.V; v++)
            if (z[v] >= cut) scratch.push_back(z[v]);
        std::sort(scratch.begin(), scratch.end(), std::greater<float>());
        double mass = 0.0;
        size_t last = 0;
        while (last < scratch.size()) {
            mass += std::exp(scratch[last] - best);
            if (mass >= (double)row.top_p * total || last + 1 == scratch.size()) break;
            last++;
        }
        floor = std::max(floor, scratch[last]);
    }
    if (row.min_p > 0.0f) floor = std::max(floor, best + std::log(row.min_p));
    return floor;
}

int64_t sample(const Row& row) {
    if (row.temperature == 0.0f) return argmax(row.logits, row.V);
    static thread_local std::vector<float> z, scratch;
    const int64_t padded = (row.V + 15) / 16 * 16;
    z.assign(padded, -INFINITY);
    for (int64_t v = 0; v < row.V; v++) z[v] = row.logits[v] / row.temperature;
    const float best = *std::max_element(z.begin(), z.end());
    const float floor = floor_of(row, z, best, scratch);
    f32x16 highest = splat(-INFINITY);
    u32x16 where = {};
    for (int64_t v = 0; v < padded; v += 16) {
        const f32x16 x = load<f32x16>(&z[v]);
        if (max_of(x) < floor) continue;
        const u32x16 tokens = kLaneIds + (uint32_t)v;
        const f32x16 score = x >= floor ? x + gumbel(tokens, row.first, row.second) : splat(-INFINITY);
        where = score > highest ? tokens : where;
        highest = max16(score, highest);
    }
    return first_best(highest, where);
}

}  // namespace
}  // namespace df

// tokens[r]: of the highest logit of a row, the first of equals. logits: fp32 [R][V].
extern "C" void df_argmax(const float* logits, int64_t R, int64_t V, int64_t* tokens) {
    df::parallel((int)R, [&](int r) { tokens[r] = df::argmax(logits + r * V, V); });
}
DF_RECORDABLE(df_argmax)

// logits: fp32 [R][V]; per row: temperature (0: greedy), top_k (0: off), top_p, min_p, seed and position.
extern "C" void df_sample(const float* logits, int64_t R, int64_t V, const float* temperature,
                          const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* seeds,
                          const int64_t* positions, int64_t* tokens) {
    using namespace df;
    parallel((int)R, [&](int r) {
        const uint64_t seed = (uint64_t)seeds[r];
        const uint32_t low = mix((uint32_t)seed + kWeyl);
        const uint32_t both = low ^ mix((uint32_t)(seed >> 32) + 2 * kWeyl);
        const uint32_t first = mix(mix(both) ^ mix((uint32_t)positions[r] + 3 * kWeyl));
        tokens[r] = sample({logits + r * V, V, temperature[r], top_p[r], min_p[r], top_k[r], first,
                            mix(first ^ kMix2)});
    });
}
DF_RECORDABLE(df_sample)
