// SPDX-License-Identifier: Apache-2.0
//! Numbers in memory that another process may write: only copies are returned.
//!
//! Separate from the mapping itself and without system calls, so that Miri can run it.

#![expect(unsafe_code, reason = "memory of another process has no safe form")]

/// A place in memory, and how many numbers lie there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    start: *const f32,
    n_floats: usize,
}

impl Numbers {
    /// # Safety
    /// As long as this is used, `n_floats` numbers from `start` on can be read, and `start` is
    /// aligned for them.
    pub(super) unsafe fn new(start: *const f32, n_floats: usize) -> Self {
        Self { start, n_floats }
    }

    /// Copies the numbers from `at` on.
    pub(super) fn load(self, at: usize, out: &mut [f32]) {
        let from = self.from(at, out.len());
        // SAFETY: `from` has checked that there are that many, and private memory never overlaps
        // them. If the owner writes meanwhile the numbers are torn, but still numbers.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    }

    /// Adds the numbers from `at` on, each as `seen` makes it.
    pub(super) fn add(self, at: usize, out: &mut [f32], seen: impl Fn(f32) -> f32) {
        let from = self.from(at, out.len());
        // SAFETY: as in `load`; `place` is below the length that was checked.
        let read = |place: usize| unsafe { from.add(place).read() };
        out.iter_mut().enumerate().for_each(|(place, sum)| *sum += seen(read(place)));
    }

    fn from(self, at: usize, n: usize) -> *const f32 {
        let end = at.checked_add(n);
        assert!(end.is_some_and(|end| end <= self.n_floats), "inside of the peer's memory");
        // Not past the end, so it is a place of the same memory.
        self.start.wrapping_add(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [f32; 4] = [1.0, 2.0, 4.0, 8.0];

    fn numbers(memory: &[f32]) -> Numbers {
        // SAFETY: the slice outlives what a test does with it.
        unsafe { Numbers::new(memory.as_ptr(), memory.len()) }
    }

    #[test]
    fn any_range_inside_can_be_copied_and_added() {
        let memory = ALL.to_vec();
        for at in 0..=memory.len() {
            for n in 0..=memory.len() - at {
                let mut out = vec![0.0; n];
                numbers(&memory).load(at, &mut out);
                assert_eq!(out, &memory[at..at + n]);
                numbers(&memory).add(at, &mut out, |number| -number);
                assert!(out.iter().all(|sum| sum.to_bits() == 0));
            }
        }
    }

    #[test]
    fn nothing_outside_can_be() {
        let memory = ALL.to_vec();
        for (at, n) in [(4, 1), (0, 5), (3, 2), (usize::MAX, 1), (usize::MAX, 2)] {
            let copied = std::panic::catch_unwind(|| numbers(&memory).load(at, &mut [0.0; 8][..n]));
            assert!(copied.is_err(), "{n} from {at}");
        }
    }
}
