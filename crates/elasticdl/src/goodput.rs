// SPDX-License-Identifier: Apache-2.0
//! How the workers spent their time, in one line.

use edl_net::proto::Goodput;

use crate::console::grouped;

/// `92 % compute, 5 % communicate, 3 % heal; batches trained again: 12`; none before there
/// was any time.
pub(crate) fn line(goodput: &Goodput) -> Option<String> {
    let spent = goodput.workers?;
    let total = spent.total();
    if total <= 0.0 {
        return None;
    }
    let mut parts: Vec<_> = spent.parts().into_iter().collect();
    parts.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let shown = parts.iter().map(|(kind, secs)| (kind, secs * 100.0 / total));
    let shown = shown.filter(|(_, percent)| *percent >= 0.5);
    let shown: Vec<String> = shown
        .map(|(kind, percent)| format!("{percent:.0} % {}", kind.name().replace('_', " ")))
        .collect();
    let mut text = shown.join(", ");
    if goodput.repeated > 0 {
        text += &format!("; batches trained again: {}", grouped(goodput.repeated));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use edl_net::proto::Spent;

    use super::*;

    #[test]
    fn the_largest_share_comes_first_and_small_ones_are_left_out() {
        let spent = Spent { compute: 60.0, data_wait: 39.9, down: 0.1, ..Spent::default() };
        let mut goodput = Goodput { workers: Some(spent), repeated: 1200, ..Goodput::default() };
        let expected = "60 % compute, 40 % data wait; batches trained again: 1,200";
        assert_eq!(line(&goodput).unwrap(), expected);
        goodput.workers = Some(Spent::default());
        assert_eq!(line(&goodput), None);
    }
}
