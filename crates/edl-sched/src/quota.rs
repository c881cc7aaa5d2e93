// SPDX-License-Identifier: Apache-2.0
//! What queues may use: always their quota, and beyond it what other queues leave unused.

use crate::board::Board;
use crate::resources::Resources;
use crate::snapshot::QueueId;

/// Whether jobs of `queue` may use `more` than they do.
#[must_use]
pub fn allows(board: &Board<'_>, queue: QueueId, more: Resources) -> bool {
    let Some(mine) = board.queues.get(&queue) else { return true };
    let Some(quota) = mine.queue.quota else { return true };
    let after = mine.used + more;
    if after.fits_in(quota) {
        return true;
    }
    let is_too_much = mine.queue.borrow.is_some_and(|borrow| !after.fits_in(quota + borrow));
    if is_too_much || !mine.may_borrow {
        return false;
    }
    let (promised, used) = promised_and_used(board);
    (used + more).fits_in(promised)
}

/// Whether `queue` would stay inside its own quota.
#[must_use]
pub fn is_own(board: &Board<'_>, queue: QueueId, more: Resources) -> bool {
    let Some(mine) = board.queues.get(&queue) else { return true };
    mine.queue.quota.is_none_or(|quota| (mine.used + more).fits_in(quota))
}

/// Whether `taker` would exceed its quota with resources from within the quota of `giver`, and would
/// have to return them at once.
#[must_use]
pub fn would_borrow_what_is_owned(
    board: &Board<'_>,
    taker: QueueId,
    more: Resources,
    giver: QueueId,
) -> bool {
    let has_quota =
        |queue: QueueId| board.queues.get(&queue).is_some_and(|q| q.queue.quota.is_some());
    taker != giver
        && has_quota(giver)
        && is_own(board, giver, Resources::ZERO)
        && !is_own(board, taker, more)
}

/// Whether `queue` uses more than its quota and what it may borrow.
#[must_use]
pub fn is_beyond(board: &Board<'_>, queue: QueueId) -> bool {
    let Some(mine) = board.queues.get(&queue) else { return false };
    let Some(quota) = mine.queue.quota else { return false };
    let beyond_limit = mine.queue.borrow.is_some_and(|borrow| !mine.used.fits_in(quota + borrow));
    let (promised, used) = promised_and_used(board);
    beyond_limit || (!mine.used.fits_in(quota) && !used.fits_in(promised))
}

fn promised_and_used(board: &Board<'_>) -> (Resources, Resources) {
    let limited = board.queues.values().filter_map(|one| Some((one.queue.quota?, one.used)));
    limited.fold((Resources::ZERO, Resources::ZERO), |(promised, used), (quota, more)| {
        (promised + quota, used + more)
    })
}
