// SPDX-License-Identifier: Apache-2.0
//! Numbers for names: plans refer to jobs and nodes by number.

use std::collections::BTreeMap;

/// A number for each name, which stays the same while the name exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    by_name: BTreeMap<String, u32>,
    next: u32,
}

impl Numbers {
    /// The number of a name; new names get unused numbers.
    pub(crate) fn of(&mut self, name: &str) -> u32 {
        if let Some(number) = self.by_name.get(name) {
            return *number;
        }
        let number = self.next;
        self.next += 1;
        self.by_name.insert(name.to_owned(), number);
        number
    }

    /// Forgets all names but these.
    pub(crate) fn keep_only(&mut self, is_there: impl Fn(&str) -> bool) {
        self.by_name.retain(|name, _| is_there(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_kept_and_never_given_again() {
        let mut numbers = Numbers::default();
        assert_eq!(["a", "b", "a"].map(|name| numbers.of(name)), [0, 1, 0]);
        numbers.keep_only(|name| name == "b");
        assert_eq!(["b", "a"].map(|name| numbers.of(name)), [1, 2]);
    }
}
