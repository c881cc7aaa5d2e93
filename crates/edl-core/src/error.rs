// SPDX-License-Identifier: Apache-2.0
//! Error messages for users and logs.

use std::io;

/// An error and its causes, in one line. A cause that the error's own text contains is left out.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

/// Whether there was no room to write something: the same may succeed later.
#[must_use]
pub fn is_disk_full(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|it| is_full(it.kind())))
}

/// Whether the system says that a disk or a quota is full.
#[must_use]
pub fn is_full(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write `x`")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_full_disk_is_recognized_below_other_errors() {
        for (kind, expected) in [
            (io::ErrorKind::StorageFull, true),
            (io::ErrorKind::QuotaExceeded, true),
            (io::ErrorKind::PermissionDenied, false),
        ] {
            assert_eq!(is_disk_full(&Outer(kind.into())), expected, "{kind}");
        }
    }
}
