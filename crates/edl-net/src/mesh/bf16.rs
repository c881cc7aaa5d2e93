// SPDX-License-Identifier: Apache-2.0
//! Numbers of 16 bits: the upper half of an `f32`, rounded to the nearest, ties to even.

/// The nearest number of 16 bits.
pub(super) fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    // Rounding up could turn a NaN into an infinity, so it keeps its upper half and becomes quiet.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let bits = if value.is_nan() { bits | 0x0040_0000 } else { rounded };
    u16::try_from(bits >> 16).unwrap_or(u16::MAX)
}

pub(super) fn to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// The nearest number of 16 bits, as an `f32`.
pub(super) fn round(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    f32::from_bits(if value.is_nan() { bits | 0x0040_0000 } else { rounded } & 0xffff_0000)
}

/// Rounds every number to 16 bits. A lane that is added to others by its member before the sum
/// must be rounded by it, so that bits do not depend on who runs which lane.
pub fn round_all(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = round(*value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_the_nearest_and_ties_to_even() {
        let cases = [
            (0x3f80_0000, 0x3f80),
            (0x3f80_8000, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_8000, 0x3f82),
            (0x7f7f_ffff, 0x7f80),
            (0xff80_0000, 0xff80),
            (0x8000_0001, 0x8000),
            (0x7f80_0001, 0x7fc0),
        ];
        for (bits, half) in cases {
            assert_eq!(from_f32(f32::from_bits(bits)), half, "{bits:x}");
            assert_eq!(round(f32::from_bits(bits)).to_bits(), u32::from(half) << 16, "{bits:x}");
        }
    }

    #[test]
    fn every_number_of_16_bits_is_itself_or_a_quiet_nan() {
        for half in 0..=u16::MAX {
            let same = from_f32(to_f32(half));
            assert!(same == half || (to_f32(half).is_nan() && same == half | 0x40));
        }
    }
}
