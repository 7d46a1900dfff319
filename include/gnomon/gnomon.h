/* C interface to the operator of gnomon/attention.h, for contiguous, row-major float arrays.
 * Zero-initialise each structure before use; null pointers stand for absent arrays. The functions
 * return GNOMON_OK or an error code, and write nothing if an argument is invalid. */
#ifndef GNOMON_GNOMON_H_
#define GNOMON_GNOMON_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* s_ij = factor_h f(x_i . y_j or |x_i - y_j|^2; scalars) + bias_h(j - i), o_i = softmax_j(s_ij)
 * v_j. heads is a multiple of key_heads. function names the pair function ("dot", "laplacian",
 * ...), which determines f and the numbers of scalars R, C and S. */
typedef struct gnomon_attention {
  const char* function;
  int64_t batch, heads, key_heads, queries, keys, dim, value_dim;
  const float* x;              /* (batch, heads, queries, dim) */
  const float* y;              /* (batch, key_heads, keys, dim) */
  const float* v;              /* (batch, key_heads, keys, value_dim) */
  const float* row_scalars;    /* (R, batch, heads, queries) */
  const float* column_scalars; /* (C, batch, key_heads, keys) */
  const float* head_scalars;   /* (S, heads) */
  const float* factor;         /* (heads): 1 / sqrt(dim), -gamma, ... */
  const float* bias;           /* (heads, queries + keys - 1) or null: entry j - i + queries - 1 */
  int causal;                  /* nonzero: keys j <= i + query_offset */
  int64_t query_offset;
  int threads; /* maximum number of threads; 0 means 1 */
  /* (3, batch, heads, queries) or null: per-row results that the forward function stores for
   * the backward function (AttentionOutput of gnomon/attention.h). If null, the backward function
   * recomputes the forward pass. */
  float* statistics;
  /* Fraction of a row's total weight that may be skipped (AttentionInput of gnomon/attention.h), at
   * least 0 and below 1; 0 computes everything. */
  double tolerance;
} gnomon_attention;

/* Gradients, each with the shape of the corresponding input. Null: not computed. */
typedef struct gnomon_attention_gradient {
  float *x, *y, *v, *row_scalars, *column_scalars, *head_scalars, *factor, *bias;
} gnomon_attention_gradient;

enum { GNOMON_OK = 0, GNOMON_INVALID_ARGUMENT = 1, GNOMON_FAILURE = 2 };

/* Writes o (batch, heads, queries, value_dim) and lse (batch, heads, queries), the logarithm of
 * sum_j exp(s_ij). If all keys are masked for a query, o is 0 and lse is -inf. */
int gnomon_attention_forward(const gnomon_attention* input, float* o, float* lse);

/* Reads o and lse as written by the forward function, and d_o with the shape of o. */
int gnomon_attention_backward(const gnomon_attention* input, const float* o, const float* lse,
                              const float* d_o, const gnomon_attention_gradient* gradient);

/* The error message of this thread's latest call, or "" on success; valid until its next call. */
const char* gnomon_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* GNOMON_GNOMON_H_ */
