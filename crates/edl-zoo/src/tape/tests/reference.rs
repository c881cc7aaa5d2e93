// SPDX-License-Identifier: Apache-2.0
//! The operations in double precision, as plainly as possible.

/// Of x, weight and bias.
pub(super) fn linear(p: &[Vec<f64>], n_in: usize) -> Vec<f64> {
    let n_out = p[2].len();
    let at = |row: &[f64], j: usize| {
        let terms = (0..n_in).map(|i| row[i] * p[1][i * n_out + j]);
        p[2][j] + terms.sum::<f64>()
    };
    p[0].chunks(n_in).flat_map(|row| (0..n_out).map(|j| at(row, j)).collect::<Vec<_>>()).collect()
}

/// Of x, weight and bias.
pub(super) fn conv(p: &[Vec<f64>], [height, width, channels]: [usize; 3]) -> Vec<f64> {
    let filters = p[2].len();
    let mut found = Vec::new();
    for image in p[0].chunks(height * width * channels) {
        for place in 0..(height - 2) * (width - 2) {
            let (y, x) = (place / (width - 2), place % (width - 2));
            for filter in 0..filters {
                let mut sum = p[2][filter];
                for tap in 0..9 {
                    for c in 0..channels {
                        let pixel = (y + tap / 3) * width + x + tap % 3;
                        sum +=
                            image[pixel * channels + c] * p[1][(filter * channels + c) * 9 + tap];
                    }
                }
                found.push(sum.max(0.0));
            }
        }
    }
    found
}

pub(super) fn max_pool(x: &[f64], [height, width, channels]: [usize; 3]) -> Vec<f64> {
    let mut found = Vec::new();
    for image in x.chunks(height * width * channels) {
        for place in 0..height / 2 * (width / 2) {
            let first = place / (width / 2) * 2 * width + place % (width / 2) * 2;
            for c in 0..channels {
                let window = [first, first + 1, first + width, first + width + 1];
                let numbers = window.map(|pixel| image[pixel * channels + c]);
                found.push(numbers.into_iter().fold(f64::MIN, f64::max));
            }
        }
    }
    found
}

/// Of x, gamma and beta.
pub(super) fn batch_norm(p: &[Vec<f64>]) -> Vec<f64> {
    let channels = p[1].len();
    let n = (p[0].len() / channels) as f64;
    let mut found = p[0].clone();
    for c in 0..channels {
        let values = || p[0].iter().skip(c).step_by(channels);
        let mean = values().sum::<f64>() / n;
        let variance = values().map(|value| (value - mean).powi(2)).sum::<f64>() / n;
        for value in found.iter_mut().skip(c).step_by(channels) {
            *value = (*value - mean) / (variance + 1e-3).sqrt() * p[1][c] + p[2][c];
        }
    }
    found
}

/// Of one record's vectors of `dim` numbers each.
pub(super) fn pairs(record: &[f64], dim: usize) -> f64 {
    let vectors: Vec<&[f64]> = record.chunks(dim).collect();
    let mut sum = 0.0;
    for (i, a) in vectors.iter().enumerate() {
        for b in &vectors[i + 1..] {
            sum += a.iter().zip(*b).map(|(a, b)| a * b).sum::<f64>();
        }
    }
    sum
}

pub(super) fn softmax_cross_entropy(logits: &[f64], labels: &[usize]) -> f64 {
    let rows = logits.chunks(logits.len() / labels.len()).zip(labels);
    let losses = rows.map(|(row, label)| {
        let sum: f64 = row.iter().map(|value| value.exp()).sum();
        -(row[*label].exp() / sum).ln()
    });
    losses.sum::<f64>() / labels.len() as f64
}

pub(super) fn sigmoid_cross_entropy(logits: &[f64], labels: &[bool]) -> f64 {
    let losses = logits.iter().zip(labels).map(|(z, label)| {
        let probability = 1.0 / (1.0 + (-z).exp());
        -(if *label { probability } else { 1.0 - probability }).ln()
    });
    losses.sum::<f64>() / labels.len() as f64
}
