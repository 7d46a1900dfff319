#include "cuda/relative_tables.h"

namespace gnomon::cuda {
namespace {

Matrix ToMatrix(const Tokens& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2], 1, 1}; }
Matrix Transposed(const Matrix& m) { return {m.data, m.batch, m.head, m.column, m.row, m.element}; }

}  // namespace

void RelativeTables::ComputeScores(int64_t first, int64_t count) {
  const Relative<float>& relative = in_.relative;
  if (relative.keys != nullptr) {
    SetProduct(ToMatrix(in_.relative_query),
               Transposed(RowsOf(relative.keys, relative.dim, relative.key_heads)), relative.factor,
               p_.relative_scores, /*adds=*/false);
    Multiply(n_.queries, p_.relative_size, relative.dim, count);
  }
  if (relative.queries != nullptr) {
    SetProduct(ToMatrix(in_.relative_key), Transposed(QueryRows(relative.queries)), relative.factor,
               p_.relative_key_scores, /*adds=*/false);
    MultiplyKeys(n_.keys, KeyTableColumns(), relative.key_dim, first, count);
  }
}

void RelativeTables::AddValues(int64_t first, int64_t count) {
  Product& product = NewProduct();
  product.left = Tables(p_.relative_weights);
  product.skips = 1;
  product.right = RowsOf(in_.relative.values, n_.value_dim, in_.relative.value_heads);
  product.to = p_.exact_o + first * n_.queries * n_.value_dim;
  product.adds = 1;
  product.rounded = p_.o;
  Multiply(n_.queries, n_.value_dim, p_.relative_size, count);
}

void RelativeTables::MultiplyByValues(const Tokens& d_o, int64_t count) {
  Product& product = NewProduct();
  product.left = ToMatrix(d_o);
  product.right = Transposed(RowsOf(in_.relative.values, n_.value_dim, in_.relative.value_heads));
  product.to = p_.relative_products;
  Multiply(n_.queries, p_.relative_size, n_.value_dim, count);
}

void RelativeTables::MultiplySums(const Gradient& gradient, int64_t first, int64_t count) {
  const Relative<float>& relative = in_.relative;
  if (gradient.relative_query.data != nullptr) {
    Product& product = NewProduct();
    product.left = Tables(p_.d_relative_scores);
    product.skips = 1;
    product.right = RowsOf(relative.keys, relative.dim, relative.key_heads);
    product.factor = relative.factor;
    product.rounded = ToArray(gradient.relative_query);
    Multiply(n_.queries, relative.dim, p_.relative_size, count);
  }
  if (gradient.relative_keys != nullptr) {
    Product& product = NewProduct();
    product.left = Transposed(Tables(p_.d_relative_scores));
    product.skips = 1;
    product.right = ToMatrix(in_.relative_query);
    product.factor = relative.factor;
    product.to = d_relative_keys_ + first * p_.relative_size * relative.dim;
    Multiply(p_.relative_size, relative.dim, n_.queries, count);
  }
  if (gradient.relative_values != nullptr) {
    Product& product = NewProduct();
    product.left = Transposed(Tables(p_.relative_weights));
    product.skips = 1;
    product.right = {p_.d_o.data, p_.d_o.stride[0], p_.d_o.stride[1], p_.d_o.stride[2], 1, 1};
    product.to = d_relative_values_ + first * p_.relative_size * n_.value_dim;
    Multiply(p_.relative_size, n_.value_dim, n_.queries, count);
  }
}

void RelativeTables::MultiplyKeySums(const Gradient& gradient, int64_t first, int64_t count) {
  const Relative<float>& relative = in_.relative;
  if (gradient.relative_key.data != nullptr) {
    SetProduct(KeyTables(p_.d_relative_key_scores), QueryRows(relative.queries), relative.factor,
               nullptr, /*adds=*/false);
    p_.product.skips = 1;
    p_.product.rounded = ToArray(gradient.relative_key);
    MultiplyKeys(n_.keys, relative.key_dim, KeyTableColumns(), first, count);
  }
  if (gradient.relative_queries != nullptr) {
    SetProduct(Transposed(KeyTables(p_.d_relative_key_scores)), ToMatrix(in_.relative_key),
               relative.factor,
               d_relative_queries_ + first / p_.group * KeyTableColumns() * relative.key_dim,
               /*adds=*/false);
    p_.product.skips = 1;
    MultiplyKeys(KeyTableColumns(), relative.key_dim, n_.keys, first, count);
  }
}

void RelativeTables::AllocateTangents(const Input& tangent, bool is_backward, int64_t count) {
  const Constants& c = context_.features();
  const int64_t numbers = count * n_.queries * p_.relative_size;
  const auto need = [&](bool is_needed, float*& table) {
    if (is_needed && table == nullptr) table = context_.New<float>(Size(numbers));
  };
  // The first slice is the largest.
  const bool keys = c.kRelativeKeys != 0;
  const bool values = c.kRelativeValues != 0;
  need(keys && (tangent.relative_query.data != nullptr || tangent.relative.keys != nullptr),
       p_.tangent.relative_scores);
  need(values, p_.tangent.relative_weights);
  need(keys && is_backward, p_.tangent.d_relative_scores);
  need(values && is_backward &&
           (tangent.relative.values != nullptr || p_.tangent.d_o.data != nullptr),
       p_.tangent.relative_products);
  if (keys && is_backward && query_tangents_ == nullptr) {
    query_tangents_ = context_.New<float>(Size(count * n_.queries * in_.relative.dim));
  }
  if (c.kRelativeQueries == 0) return;
  const int64_t rows = count / p_.group * n_.keys;
  const auto need_of_keys = [&](bool is_needed, float*& table) {
    if (is_needed && table == nullptr) table = context_.New<float>(Size(rows * KeyTableColumns()));
  };
  need_of_keys(tangent.relative_key.data != nullptr || tangent.relative.queries != nullptr,
               p_.tangent.relative_key_scores);
  need_of_keys(is_backward, p_.tangent.d_relative_key_scores);
  if (is_backward && key_tangents_ == nullptr) {
    key_tangents_ = context_.New<float>(Size(rows * in_.relative.key_dim));
  }
}

void RelativeTables::SetProduct(const Matrix& left, const Matrix& right, float factor, float* to,
                                bool adds) {
  Product& product = NewProduct();
  product.left = left;
  product.right = right;
  product.factor = factor;
  product.to = to;
  product.adds = adds ? 1 : 0;
}

void RelativeTables::ComputeScoreTangents(const Input& tangent, int64_t first, int64_t count) {
  const Relative<float>& relative = in_.relative;
  bool adds = false;
  const auto multiply = [&](const Tokens& query, const float* keys) {
    if (query.data == nullptr || keys == nullptr) return;
    SetProduct(ToMatrix(query), Transposed(RowsOf(keys, relative.dim, relative.key_heads)),
               relative.factor, p_.tangent.relative_scores, adds);
    Multiply(n_.queries, p_.relative_size, relative.dim, count);
    adds = true;
  };
  multiply(tangent.relative_query, relative.keys);
  multiply(in_.relative_query, tangent.relative.keys);
  adds = false;
  const auto multiply_keys = [&](const Tokens& key, const float* queries) {
    if (key.data == nullptr || queries == nullptr) return;
    SetProduct(ToMatrix(key), Transposed(QueryRows(queries)), relative.factor,
               p_.tangent.relative_key_scores, adds);
    MultiplyKeys(n_.keys, KeyTableColumns(), relative.key_dim, first, count);
    adds = true;
  };
  multiply_keys(tangent.relative_key, relative.queries);
  multiply_keys(in_.relative_key, tangent.relative.queries);
}

void RelativeTables::AddValueTangents(const Input& tangent, int64_t first, int64_t count) {
  float* const to = p_.tangent.o + first * n_.queries * n_.value_dim;
  const auto add = [&](const float* weights, const float* values) {
    if (values == nullptr) return;
    SetProduct(Tables(weights), RowsOf(values, n_.value_dim, in_.relative.value_heads), 1, to,
               /*adds=*/true);
    p_.product.skips = 1;
    Multiply(n_.queries, n_.value_dim, p_.relative_size, count);
  };
  add(p_.tangent.relative_weights, in_.relative.values);
  add(p_.relative_weights, tangent.relative.values);
}

void RelativeTables::MultiplyTangentsByValues(const Input& tangent, const Tokens& d_o,
                                              const Tokens& d_o_tangent, int64_t count) {
  bool adds = false;
  const auto multiply = [&](const Tokens& rows, const float* values) {
    if (rows.data == nullptr || values == nullptr) return;
    SetProduct(ToMatrix(rows), Transposed(RowsOf(values, n_.value_dim, in_.relative.value_heads)),
               1, p_.tangent.relative_products, adds);
    Multiply(n_.queries, p_.relative_size, n_.value_dim, count);
    adds = true;
  };
  multiply(d_o_tangent, in_.relative.values);
  multiply(d_o, tangent.relative.values);
}

void RelativeTables::MultiplySumTangents(const Gradient& gradient, const Input& tangent,
                                         const Tokens& d_o_tangent, int64_t first, int64_t count) {
  const Relative<float>& relative = in_.relative;
  if (gradient.relative_query.data != nullptr) {
    const auto multiply = [&](const float* tables, const float* keys, bool adds, bool is_last) {
      SetProduct(Tables(tables), RowsOf(keys, relative.dim, relative.key_heads), relative.factor,
                 query_tangents_, adds);
      p_.product.skips = 1;
      if (is_last) p_.product.rounded = ToArray(gradient.relative_query);
      Multiply(n_.queries, relative.dim, p_.relative_size, count);
    };
    const bool has_keys = tangent.relative.keys != nullptr;
    multiply(p_.tangent.d_relative_scores, relative.keys, /*adds=*/false, !has_keys);
    if (has_keys) {
      multiply(p_.d_relative_scores, tangent.relative.keys, /*adds=*/true, /*is_last=*/true);
    }
  }
  const auto multiply = [&](const float* tables, const Tokens& rows, int64_t columns, float factor,
                            float* to, bool adds) {
    if (rows.data == nullptr) return;
    SetProduct(Transposed(Tables(tables)), ToMatrix(rows), factor,
               to + first * p_.relative_size * columns, adds);
    p_.product.skips = 1;
    Multiply(p_.relative_size, columns, n_.queries, count);
  };
  if (gradient.relative_keys != nullptr) {
    const auto of_keys = [&](const float* tables, const Tokens& query, bool adds) {
      multiply(tables, query, relative.dim, relative.factor, d_relative_keys_, adds);
    };
    of_keys(p_.tangent.d_relative_scores, in_.relative_query, /*adds=*/false);
    of_keys(p_.d_relative_scores, tangent.relative_query, /*adds=*/true);
  }
  if (gradient.relative_values != nullptr) {
    const Tokens d_o = {
        p_.d_o.data, {p_.d_o.stride[0], p_.d_o.stride[1], p_.d_o.stride[2]}, in_.x.type};
    multiply(p_.tangent.relative_weights, d_o, n_.value_dim, 1, d_relative_values_, /*adds=*/false);
    multiply(p_.relative_weights, d_o_tangent, n_.value_dim, 1, d_relative_values_, /*adds=*/true);
  }
}

void RelativeTables::MultiplyKeySumTangents(const Gradient& gradient, const Input& tangent,
                                            int64_t first, int64_t count) {
  const Relative<float>& relative = in_.relative;
  if (gradient.relative_key.data != nullptr) {
    const auto multiply = [&](const float* tables, const float* queries, bool adds, bool is_last) {
      SetProduct(KeyTables(tables), QueryRows(queries), relative.factor, key_tangents_, adds);
      p_.product.skips = 1;
      if (is_last) p_.product.rounded = ToArray(gradient.relative_key);
      MultiplyKeys(n_.keys, relative.key_dim, KeyTableColumns(), first, count);
    };
    const bool has_queries = tangent.relative.queries != nullptr;
    multiply(p_.tangent.d_relative_key_scores, relative.queries, /*adds=*/false, !has_queries);
    if (has_queries) {
      multiply(p_.d_relative_key_scores, tangent.relative.queries, /*adds=*/true, /*is_last=*/true);
    }
  }
  if (gradient.relative_queries != nullptr) {
    const auto multiply = [&](const float* tables, const Tokens& key, bool adds) {
      if (key.data == nullptr) return;
      SetProduct(Transposed(KeyTables(tables)), ToMatrix(key), relative.factor,
                 d_relative_queries_ + first / p_.group * KeyTableColumns() * relative.key_dim,
                 adds);
      p_.product.skips = 1;
      MultiplyKeys(KeyTableColumns(), relative.key_dim, n_.keys, first, count);
    };
    multiply(p_.tangent.d_relative_key_scores, in_.relative_key, /*adds=*/false);
    multiply(p_.d_relative_key_scores, tangent.relative_key, /*adds=*/true);
  }
}

void RelativeTables::PrepareSums(const Gradient& gradient) {
  const int64_t entries = context_.heads() * p_.relative_size;
  if (gradient.relative_keys != nullptr) {
    d_relative_keys_ = context_.New<float>(Size(entries * in_.relative.dim));
  }
  if (gradient.relative_values != nullptr) {
    d_relative_values_ = context_.New<float>(Size(entries * n_.value_dim));
  }
  if (gradient.relative_queries != nullptr) {
    const int64_t columns = n_.batch * n_.key_heads * KeyTableColumns();
    d_relative_queries_ = context_.New<float>(Size(columns * in_.relative.key_dim));
  }
}

void RelativeTables::Sum(const Gradient& gradient) {
  const Relative<float>& relative = in_.relative;
  // `heads`: the heads of a batch element that have partial gradients.
  const auto sum = [&](const float* from, float* to, int64_t columns, bool of_each_head,
                       int64_t heads) {
    if (to == nullptr) return;
    const int64_t size = p_.relative_size * columns;
    p_.sum_from = from;
    p_.sum_to = to;
    p_.sum_size = size;
    p_.sum_from_step = size;
    p_.sum_to_step = size;
    p_.sum_outer = context_.rows() == 0 ? 0 : n_.batch;
    p_.sum_outer_stride = heads * size;
    p_.sum_count = of_each_head ? 1 : heads;
    p_.sum_stride = size;
    Constants c = context_.OfRows();
    c.kType = 0;
    context_.Launch("add_up", c, Up(size, 32 * c.kWarps), of_each_head ? heads : 1, 0);
  };
  sum(d_relative_keys_, gradient.relative_keys, relative.dim, relative.key_heads, n_.heads);
  sum(d_relative_values_, gradient.relative_values, n_.value_dim, relative.value_heads, n_.heads);
  sum(d_relative_queries_, gradient.relative_queries, relative.key_dim, relative.query_heads,
      relative.query_heads ? n_.heads : n_.key_heads);
}

void RelativeTables::AllocateTables(bool is_backward, int64_t of_queries, int64_t of_keys) {
  const auto need = [&](bool is_needed, int64_t numbers, float*& table) {
    if (is_needed && table == nullptr) table = context_.New<float>(Size(numbers));
  };
  const bool keys = context_.features().kRelativeKeys != 0;
  const bool values = context_.features().kRelativeValues != 0;
  const bool queries = context_.features().kRelativeQueries != 0;
  need(keys, of_queries, p_.relative_scores);
  need(values, of_queries, p_.relative_weights);
  need(keys && is_backward, of_queries, p_.d_relative_scores);
  need(values && is_backward, of_queries, p_.relative_products);
  need(queries, of_keys, p_.relative_key_scores);
  need(queries && is_backward, of_keys, p_.d_relative_key_scores);
}

Product& RelativeTables::NewProduct() {
  p_.product = {};
  p_.product.factor = 1;
  p_.product.heads = Int(n_.heads);
  return p_.product;
}

Matrix RelativeTables::Tables(const float* tables) const {
  const int64_t of_head = n_.queries * p_.relative_size;
  // The pointer is shifted, because head indices start at first_head.
  return {tables - p_.relative_row * p_.relative_size,
          n_.heads * of_head,
          of_head,
          p_.relative_size,
          1,
          0};
}

Matrix RelativeTables::RowsOf(const float* table, int64_t columns, bool of_each_head) const {
  return {table, 0, of_each_head ? p_.relative_size * columns : 0, columns, 1, 0};
}

void RelativeTables::Multiply(int64_t rows, int64_t columns, int64_t depth, int64_t count) {
  p_.product.rows = Int(rows);
  p_.product.columns = Int(columns);
  p_.product.depth = Int(depth);
  Constants c = context_.OfRows();
  context_.Launch("multiply", c, count * Up(rows, 16) * Up(columns, 32 * c.kWarps), 1, 4 * 16 * 16);
}

Matrix RelativeTables::KeyTables(const float* tables) const {
  const int64_t of_head = n_.keys * KeyTableColumns();
  // The pointer is shifted, because head indices start at first_head.
  return {tables - p_.relative_key_row * KeyTableColumns(),
          n_.key_heads * of_head,
          of_head,
          KeyTableColumns(),
          1,
          0};
}

Matrix RelativeTables::QueryRows(const float* table) const {
  const int64_t columns = in_.relative.key_dim;
  return {table, 0, in_.relative.query_heads ? KeyTableColumns() * columns : 0, columns, 1, 0};
}

void RelativeTables::MultiplyKeys(int64_t rows, int64_t columns, int64_t depth, int64_t first,
                                  int64_t count) {
  p_.product.heads = Int(n_.key_heads);
  p_.first_head = Int(first / p_.group);
  Multiply(rows, columns, depth, count / p_.group);
  p_.first_head = Int(first);
}

}  // namespace gnomon::cuda
