// SPDX-License-Identifier: Apache-2.0
//! Buffers that are reused from pass to pass.

/// Keeps the buffers of finished passes for the next one.
///
/// A buffer's old numbers never reach a result: every operation writes all numbers of what it
/// takes. In this crate's tests buffers are filled with NaN first, so a stale number shows.
#[derive(Debug, Default)]
pub struct Pool {
    free: Vec<Vec<f32>>,
}

impl Pool {
    /// A buffer of `len` numbers of unspecified values.
    #[must_use]
    pub fn take(&mut self, len: usize) -> Vec<f32> {
        // The smallest that is large enough: passes of equal shapes find what they gave back.
        let fits = self.free.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= len);
        let best = fits.min_by_key(|(_, buffer)| buffer.capacity()).map(|(index, _)| index);
        let mut buffer = best.map_or_else(Vec::new, |index| self.free.swap_remove(index));
        if cfg!(test) {
            buffer.clear();
            buffer.resize(len, f32::NAN);
        } else {
            buffer.resize(len, 0.0);
        }
        buffer
    }

    /// Returns a buffer.
    pub fn give(&mut self, buffer: Vec<f32>) {
        if buffer.capacity() > 0 {
            self.free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_buffer_that_is_large_enough_is_reused() {
        let mut pool = Pool::default();
        let buffers = [10, 1000, 100].map(|len| pool.take(len));
        let places = buffers.each_ref().map(|buffer| buffer.as_ptr());
        buffers.into_iter().for_each(|buffer| pool.give(buffer));
        let found = [90, 1000, 10].map(|len| pool.take(len));
        assert_eq!(found.each_ref().map(Vec::len), [90, 1000, 10]);
        assert_eq!(found.map(|buffer| buffer.as_ptr()), [places[2], places[1], places[0]]);
        assert!(pool.free.is_empty());
    }
}
