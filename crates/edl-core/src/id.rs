// SPDX-License-Identifier: Apache-2.0
//! Identities as newtypes: a worker cannot be mistaken for a server.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Numbers of a term, below the term itself.
const NUMBER_BITS: u32 = 40;

macro_rules! raw_number {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $raw);

        impl $name {
            /// The number after this one.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }
    };
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        raw_number! { $(#[$doc])* $name($raw) }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

/// A number that a master gives out, above all those of masters before it. People read it as
/// `3.17`: the seventeenth of the master of term 3.
macro_rules! number_of_term {
    ($(#[$doc:meta])* $name:ident) => {
        raw_number! { $(#[$doc])* $name(u64) }

        impl $name {
            /// The number `number` of the master of `term`.
            ///
            /// # Panics
            /// If a term has given out 2^40 numbers.
            #[must_use]
            pub fn of(term: Term, number: u64) -> Self {
                assert!(number >> NUMBER_BITS == 0, "a term has 2^{NUMBER_BITS} numbers");
                Self(term.0 << NUMBER_BITS | number)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let number = self.0 & ((1 << NUMBER_BITS) - 1);
                write!(f, "{}.{number}", self.0 >> NUMBER_BITS)
            }
        }
    };
}

number! {
    /// A worker slot's occupant; a relaunched worker takes a new number.
    WorkerId(u32)
}
number! {
    /// A parameter server; a relaunched server keeps its number.
    PsId(u32)
}
number! {
    /// One of the fixed pieces that all parameter state is divided into.
    PartitionId(u32)
}
number! {
    /// Raised whenever parameter state is restored; acknowledgements of older ones are void.
    Generation(u64)
}
number! {
    /// Raised by each start of a master; lower terms are refused.
    Term(u64)
}
number_of_term! {
    /// One assignment of work to one worker; never reused within a term.
    LeaseId
}
number_of_term! {
    /// One try to write a checkpoint.
    CheckpointId
}
number_of_term! {
    /// One set of workers that train together, under AllReduce; later ones are higher.
    WorldId
}
number_of_term! {
    /// One evaluation of the model on the validation data.
    EvalId
}
number! {
    /// Differs for every start of a process, so late messages of a dead one are recognized.
    Incarnation(u64)
}

/// The identity of a batch: which records it names is a function of the job's plan alone.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct BatchId {
    pub epoch: u32,
    pub index: u32,
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch, self.index)
    }
}

/// One run of a job, from its submission to its end, across resumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub [u8; 16]);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl RunId {
    /// Reads what `Display` wrote.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != 32 || !text.is_ascii() {
            return None;
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_a_term_is_read_as_both() {
        assert_eq!(WorldId::of(Term(3), 17).to_string(), "3.17");
        assert_eq!(LeaseId::of(Term(12), 0).to_string(), "12.0");
        assert_eq!(WorldId::default().to_string(), "0.0");
    }

    #[test]
    fn numbers_of_a_later_term_are_higher() {
        let last = WorldId::of(Term(3), (1 << NUMBER_BITS) - 1);
        assert!(last < WorldId::of(Term(4), 0));
        assert_eq!(last.0, (3 << 40) | ((1 << 40) - 1), "the raw number is on the wire");
    }
}
