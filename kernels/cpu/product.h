// Small products of floats in registers: tiles of rows against columns, each number one chain of fma over
// ascending k, so that a row's result does not depend on how many rows come with it.
#pragma once
#include "simd.h"

namespace df {

constexpr int kMostRows = 12;

// Rows of numbers `stride` apart.
struct Rows {
    const float* at;
    int64_t stride;
};

// c[i] += sum over k < K of a[i][k]·b[k], for N rows and M vectors
template <int N, int M> void product(Rows a, Rows b, float* c, int64_t c_stride, int64_t K) {
    f32x16 sum[N][M];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) sum[i][j] = load<f32x16>(c + i * c_stride + j * 16);
    for (int64_t k = 0; k < K; k++) {
        f32x16 column[M];
        for (int j = 0; j < M; j++) column[j] = load<f32x16>(b.at + k * b.stride + j * 16);
        for (int i = 0; i < N; i++) {
            const f32x16 x = splat(a.at[i * a.stride + k]);
            for (int j = 0; j < M; j++) sum[i][j] = fma(column[j], x, sum[i][j]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++) store(c + i * c_stride + j * 16, sum[i][j]);
}

// The same for 1 <= rows <= N and `width` columns, a multiple of 16. Few rows take more columns at once: enough
// chains to hide the latency of fma. Many take fewer: a column read serves more rows.
template <int N = kMostRows>
void product(int64_t rows, Rows a, Rows b, float* c, int64_t c_stride, int64_t K, int64_t width) {
    if constexpr (N > 1)
        if (rows < N) return product<N - 1>(rows, a, b, c, c_stride, K, width);
    int64_t j = 0;
    const auto columns = [&] { return Rows{b.at + j, b.stride}; };
    if constexpr (N <= 6)
        for (; j + 64 <= width; j += 64) product<N, 4>(a, columns(), c + j, c_stride, K);
    for (; j + 32 <= width; j += 32) product<N, 2>(a, columns(), c + j, c_stride, K);
    if (j < width) product<N, 1>(a, columns(), c + j, c_stride, K);
}

}  // namespace df
