// SPDX-License-Identifier: Apache-2.0
//! The matrix product: the one call into the `gemm` crate, behind checked views of slices.

use gemm_common::Parallelism;

/// Terms that are added in registers before they go to memory. Above this, the library chooses by
/// the size of the caches, so results would differ bitwise between machines with different caches.
const MAX_DEPTH: usize = 512;

/// A matrix within a slice: number `(row, column)` is at `row * strides[0] + column * strides[1]`.
/// Rows may overlap.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    shape: [usize; 2],
    strides: [usize; 2],
}

impl<'a> Matrix<'a> {
    /// All of a slice, row by row.
    ///
    /// # Panics
    ///
    /// If the slice holds more or fewer numbers than the shape says.
    #[must_use]
    pub fn new(values: &'a [f32], shape: [usize; 2]) -> Self {
        assert_eq!(values.len(), shape[0] * shape[1], "the numbers of a matrix {shape:?}");
        Self { values, shape, strides: [shape[1], 1] }
    }

    /// Part of a slice, or a slice whose rows overlap.
    ///
    /// # Panics
    ///
    /// If the last number of the matrix is outside the slice.
    #[must_use]
    pub fn strided(values: &'a [f32], shape: [usize; 2], strides: [usize; 2]) -> Self {
        let last = |i: usize| shape[i].saturating_sub(1).checked_mul(strides[i]);
        let last = last(0).zip(last(1)).and_then(|(row, column)| row.checked_add(column));
        let is_empty = shape.contains(&0);
        assert!(
            is_empty || last.is_some_and(|last| last < values.len()),
            "a matrix {shape:?} with strides {strides:?} in {} numbers",
            values.len()
        );
        Self { values, shape, strides }
    }

    /// The same numbers with rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        let ([rows, columns], [down, right]) = (self.shape, self.strides);
        Self { values: self.values, shape: [columns, rows], strides: [right, down] }
    }
}

/// Writes `left · right` into `target`, row by row; adds it where `is_sum`.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn matmul(target: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, is_sum: bool) {
    let ([rows, depth], [right_depth, columns]) = (left.shape, right.shape);
    assert_eq!(depth, right_depth, "the inner sizes of a product");
    assert_eq!(target.len(), rows * columns, "the numbers of a product {rows} x {columns}");
    if target.is_empty() {
        return;
    }
    if depth == 0 && !is_sum {
        target.fill(0.0);
    }
    // Pieces of equal size rather than a small last one.
    let n_pieces = depth.div_ceil(MAX_DEPTH).max(1);
    let piece = depth.div_ceil(n_pieces).max(1);
    for start in (0..depth).step_by(piece) {
        let part = |values, offset: usize| &(values as &[f32])[offset..];
        let terms = piece.min(depth - start);
        let left_part = Matrix {
            values: part(left.values, start * left.strides[1]),
            shape: [rows, terms],
            strides: left.strides,
        };
        let right_part = Matrix {
            values: part(right.values, start * right.strides[0]),
            shape: [terms, columns],
            strides: right.strides,
        };
        product(target, left_part, right_part, is_sum || start > 0);
    }
}

/// One call of the library, with all sizes checked by now.
#[expect(unsafe_code, reason = "the library takes pointers")]
fn product(target: &mut [f32], left: Matrix<'_>, right: Matrix<'_>, is_sum: bool) {
    let ([rows, depth], columns) = (left.shape, right.shape[1]);
    let offset = |stride: usize| isize::try_from(stride).expect("strides fit into memory");
    let gemm = gemm_f32::gemm::f32::get_gemm_fn();
    // The library's kernels want columns one after the other: it computes the transposed product
    // of the transposed factors.
    // SAFETY: `matmul` has checked that the target has `rows * columns` numbers and is borrowed
    // for writing; `Matrix` can be made only with its last number inside its slice, and parts of
    // it end there too. The library reads and writes nothing beyond the given sizes.
    unsafe {
        gemm(
            columns,
            rows,
            depth,
            target.as_mut_ptr(),
            offset(columns),
            1,
            is_sum,
            right.values.as_ptr(),
            offset(right.strides[0]),
            offset(right.strides[1]),
            left.values.as_ptr(),
            offset(left.strides[0]),
            offset(left.strides[1]),
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use edl_core::rng::Rng;

    use super::*;
    use crate::tape::kernel::narrow;

    fn draw(len: usize, rng: &mut Rng) -> Vec<f32> {
        (0..len).map(|_| narrow(rng.unit()) - 0.5).collect()
    }

    fn expected(left: Matrix<'_>, right: Matrix<'_>, before: &[f32]) -> Vec<f64> {
        let at = |m: Matrix<'_>, row: usize, column: usize| {
            f64::from(m.values[row * m.strides[0] + column * m.strides[1]])
        };
        let mut found: Vec<f64> = before.iter().map(|value| f64::from(*value)).collect();
        for row in 0..left.shape[0] {
            for column in 0..right.shape[1] {
                let terms = (0..left.shape[1]).map(|i| at(left, row, i) * at(right, i, column));
                found[row * right.shape[1] + column] += terms.sum::<f64>();
            }
        }
        found
    }

    fn check(left: Matrix<'_>, right: Matrix<'_>, rng: &mut Rng) {
        let len = left.shape[0] * right.shape[1];
        let before = draw(len, rng);
        for is_sum in [false, true] {
            let mut target = if is_sum { before.clone() } else { vec![f32::NAN; len] };
            let before = if is_sum { before.clone() } else { vec![0.0; len] };
            matmul(&mut target, left, right, is_sum);
            for (found, expected) in target.iter().zip(expected(left, right, &before)) {
                let error = (f64::from(*found) - expected).abs();
                assert!(error < 1e-4, "{left:?} {right:?}: {found} {expected}");
            }
        }
    }

    #[test]
    fn products_are_right_for_all_kinds_of_shapes_and_strides() {
        let mut rng = Rng::new(1);
        for [rows, depth, columns] in [
            [1, 1, 1],
            [3, 2, 5],
            [7, 40, 1],
            [1, 40, 9],
            [64, 3, 32],
            [24, 96, 64],
            [65, 0, 7],
            [10, 1030, 17],
            [90, 513, 70],
        ] {
            let (left, right) = (draw(rows * depth, &mut rng), draw(depth * columns, &mut rng));
            let rows_of = |values, shape| Matrix::new(values, shape);
            let columns_of = |values, [r, c]: [usize; 2]| Matrix::new(values, [c, r]).transposed();
            let (l, r) = ([rows, depth], [depth, columns]);
            check(rows_of(&left, l), rows_of(&right, r), &mut rng);
            check(columns_of(&left, l), rows_of(&right, r), &mut rng);
            check(rows_of(&left, l), columns_of(&right, r), &mut rng);
            check(columns_of(&left, l), columns_of(&right, r), &mut rng);
        }
    }

    #[test]
    fn rows_may_overlap() {
        let mut rng = Rng::new(2);
        let (left, right) = (draw(9 * 4 + 12, &mut rng), draw(12 * 5, &mut rng));
        let left = Matrix::strided(&left, [10, 12], [4, 1]);
        check(left, Matrix::new(&right, [12, 5]), &mut rng);
    }

    #[test]
    #[should_panic(expected = "a matrix [3, 4] with strides [5, 1] in 13 numbers")]
    fn a_matrix_outside_its_slice_is_refused() {
        let _ = Matrix::strided(&[0.0; 13], [3, 4], [5, 1]);
    }

    #[test]
    #[should_panic(expected = "the numbers of a product 2 x 2")]
    fn a_target_of_another_size_is_refused() {
        let values = [0.0; 4];
        let matrix = Matrix::new(&values, [2, 2]);
        matmul(&mut [0.0; 3], matrix, matrix, false);
    }
}
