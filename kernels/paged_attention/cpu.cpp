// Causal attention over the paged cache in bf16, for any mix of prefill chunks and decodes.
//
// One work item is a tile of query rows (tokens times the query heads that share a KV head) of one sequence.
// It walks the blocks of 16 keys in order with an online softmax; a row's arithmetic does not depend on the
// other rows, so a token's output is the same in a prefill chunk, in a decode, alone or in a batch.
// kv: one layer of the cache, [2][kv_heads][16][D] every block_stride numbers.
#include "../cpu/entry.h"
#include "../cpu/pool.h"
#include "../cpu/simd.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace df {
namespace {

constexpr int kBlock = 16;
constexpr int kRows = 24;

struct Attention {
    const bf16* q;
    const bf16* kv;
    bf16* out;
    const int32_t* table;
    const int64_t* positions;
    int64_t table_width, block_stride, plane_stride, head_stride, q_stride, heads, kv_heads;
    float scale;
};

struct Tile {
    int32_t seq, first, count;
};

// Keys transposed, so that a lane is a key; values as they are.
template <int DV> struct Block {
    f32x16 k[DV * 16];
    f32x16 v[kBlock][DV];

    void fill(const bf16* keys, const bf16* values) {
        float wide[kBlock][DV * 16];
        for (int t = 0; t < kBlock; t++)
            for (int j = 0; j < DV; j++) {
                store(&wide[t][j * 16], load_bf16(keys + (t * DV + j) * 16));
                v[t][j] = load_bf16(values + (t * DV + j) * 16);
            }
        for (int d = 0; d < DV * 16; d++)
            for (int t = 0; t < kBlock; t++) k[d][t] = wide[t][d];
    }
};

template <int DV> struct Row {
    float q[DV * 16];
    f32x16 acc[DV];
    float peak, total;
    int64_t position;
};

template <int DV, int N> void scores(const Block<DV>& block, const Row<DV>* rows, f32x16* out) {
    f32x16 s[N] = {};
    for (int d = 0; d < DV * 16; d++)
        for (int i = 0; i < N; i++) s[i] = fma(block.k[d], splat(rows[i].q[d]), s[i]);
    for (int i = 0; i < N; i++) out[i] = s[i];
}

template <int DV> void absorb(const Block<DV>& block, Row<DV>& row, f32x16 s, int64_t first_key) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const i32x16 seen = lanes <= (int32_t)std::min<int64_t>(row.position - first_key, 15);
    s = seen ? s : splat(-INFINITY);
    const float peak = std::max(row.peak, max_of(s));
    const float fade = row.peak == peak ? 1.0f : std::exp(row.peak - peak);
    const f32x16 weights = exp16(s - peak);
    row.total = row.total * fade + sum16(weights);
    row.peak = peak;
    float w[kBlock];
    store(w, weights);
    f32x16 acc[DV];
    for (int j = 0; j < DV; j++) acc[j] = row.acc[j] * fade;
    for (int t = 0; t < kBlock; t++)
        for (int j = 0; j < DV; j++) acc[j] = fma(block.v[t][j], splat(w[t]), acc[j]);
    for (int j = 0; j < DV; j++) row.acc[j] = acc[j];
}

template <int DV> void attend(const Attention& a, const Tile& tile, int64_t kv_head) {
    const int64_t group = a.heads / a.kv_heads, D = DV * 16;
    const int count = (int)(tile.count * group);
    static thread_local std::vector<Row<DV>> rows(kRows);
    static thread_local Block<DV> block;
    if ((int)rows.size() < count) rows.resize(count);
    for (int i = 0; i < count; i++) {
        Row<DV>& row = rows[i];
        const int64_t token = tile.first + i / group;
        const bf16* q = a.q + token * a.q_stride + (kv_head * group + i % group) * D;
        for (int d = 0; d < D; d++) row.q[d] = to_float(q[d]) * a.scale;
        for (int j = 0; j < DV; j++) row.acc[j] = f32x16{};
        row.peak = -INFINITY;
        row.total = 0.0f;
        row.position = a.positions[token];
    }
    const int64_t last = rows[count - 1].position;
    for (int64_t b = 0; b * kBlock <= last; b++) {
        const bf16* slab = a.kv + a.table[tile.seq * a.table_width + b] * a.block_stride + kv_head * a.head_stride;
        block.fill(slab, slab + a.plane_stride);
        f32x16 s[8];
        for (int i = 0; i < count;) {
            const int n = count - i >= 8 ? 8 : count - i >= 4 ? 4 : count - i >= 2 ? 2 : 1;
            if (n == 8) scores<DV, 8>(block, &rows[i], s);
            else if (n == 4) scores<DV, 4>(block, &rows[i], s);
            else if (n == 2) scores<DV, 2>(block, &rows[i], s);
            else scores<DV, 1>(block, &rows[i], s);
            for (int j = 0; j < n; j++)
                if (rows[i + j].position >= b * kBlock) absorb(block, rows[i + j], s[j], b * kBlock);
            i += n;
        }
    }
    for (int i = 0; i < count; i++) {
        const int64_t token = tile.first + i / group;
        bf16* out = a.out + (token * a.heads + kv_head * group + i % group) * D;
        const float scale = 1.0f / rows[i].total;
        for (int j = 0; j < DV; j++) store_bf16(out + j * 16, rows[i].acc[j] * scale);
    }
}

template <int DV> void run(const Attention& a, const std::vector<Tile>& tiles) {
    const int items = (int)(tiles.size() * a.kv_heads);
    parallel(items, [&](int i) { attend<DV>(a, tiles[i / a.kv_heads], i % a.kv_heads); });
}

}  // namespace
}  // namespace df

// q: [T][q_stride]; out: [T][heads][D]; table: [B][table_width]; returns 0, or 1 for a head size it has not.
extern "C" int df_paged_attention(const uint16_t* q, const uint16_t* kv, uint16_t* out, const int32_t* table,
                                  const int32_t* query_start, const int64_t* positions, int64_t sequences,
                                  int64_t table_width, int64_t block_stride, int64_t heads, int64_t kv_heads,
                                  int64_t D, int64_t q_stride, float scale) {
    using namespace df;
    const int64_t head = kBlock * D, plane = kv_heads * head;
    const Attention a{q,     kv,   out,      table, positions, table_width, block_stride,
                      plane, head, q_stride, heads, kv_heads,  scale};
    const int32_t rows = std::max<int32_t>(1, (int32_t)(kRows * kv_heads / heads));
    std::vector<Tile> tiles;
    for (int32_t b = 0; b < sequences; b++)
        for (int32_t t = query_start[b]; t < query_start[b + 1]; t += rows)
            tiles.push_back({b, t, std::min(rows, query_start[b + 1] - t)});
    // long ones first: the last to finish should be short
    std::sort(tiles.begin(), tiles.end(), [&](const Tile& x, const Tile& y) {
        return positions[x.first + x.count - 1] > positions[y.first + y.count - 1];
    });
    switch (D) {
        case 32: run<2>(a, tiles); return 0;
        case 64: run<4>(a, tiles); return 0;
        case 80: run<5>(a, tiles); return 0;
        case 96: run<6>(a, tiles); return 0;
        case 128: run<8>(a, tiles); return 0;
        case 256: run<16>(a, tiles); return 0;
        default: return 1;
    }
}
DF_RECORDABLE(df_paged_attention)
