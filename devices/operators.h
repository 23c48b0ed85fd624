// What the sources of CPU operators export to each other: models/ops/cpu/layers.cpp calls these by their addresses,
// and each source that defines one includes this, so that a compiler compares them.

#pragma once

#include <cstdint>

// A layer's pages, and how they lie (attention/cpu/attention.cpp).
struct Pages {
    const void *keys, *values;
    const float* sinks;  // [H], -infinity without
    long heads, kv_heads, dim, tile, key_lanes, value_lanes;
    float scale, cap;  // a cap of 0 is none
};

extern "C" {
bool multiply(const void* x, long x_stride, const void* panels, const float* bias, void* y, long y_stride,
              long num_rows, long num_outputs, long num_inputs, int kind, int num_threads);

void norm(const void* x, const void* residual, const void* weight, void* y, void* total, long rows, long width,
          float eps, int kind, int num_threads);
void rotate(const void* x, const void* cos, const void* sin, void* y, long rows, long heads, long dim, long row_stride,
            long head_stride, int kind, int num_threads);
void gate(int which, const void* x, void* y, long rows, long width, float slope, float limit, int kind,
          int num_threads);

void write_tokens(const Pages* pages, const void* key, const void* value, const int64_t* places, long num_tokens,
                  long key_stride, long value_stride, bool in_units, int num_threads);
bool decode(const Pages* pages, const void* query, const int64_t* address, const int64_t* of_row, const int32_t* low,
            const int32_t* high, const uint8_t* is_tile, const int64_t* first_tile, void* output, float* sums,
            long rows, long most_tiles, int num_threads);
bool extend(const Pages* pages, const void* query, const int64_t* address, const int64_t* spans, void* output,
            long num_spans, long window, long first_key, int num_threads);
}
