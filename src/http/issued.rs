//! When a key was made, where the key says so.

use std::time::{Duration, SystemTime};

/// When a key that is a UUID of version 7 (RFC 9562) was made; `None` for any other key. For
/// [`IdempotencyLayer::issued_at`](super::IdempotencyLayer::issued_at):
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use keyonce::http::uuid_v7_time;
///
/// # fn check(store: keyonce::Store) {
/// let layer = keyonce::http::IdempotencyLayer::new(store).issued_at(|_, key| uuid_v7_time(key));
/// # let _ = layer;
/// # }
/// let made = uuid_v7_time(b"017f22e2-79b0-7cc3-98c4-dc0c0c07398f");
/// assert_eq!(made, Some(SystemTime::UNIX_EPOCH + Duration::from_millis(0x017f_22e2_79b0)));
/// assert_eq!(uuid_v7_time(b"4f9c0d1e-1001-4000-8000-000000000000"), None); // random, of version 4
/// ```
pub fn uuid_v7_time(key: &[u8]) -> Option<SystemTime> {
    let groups: Vec<_> = std::str::from_utf8(key).ok()?.split('-').collect();
    let [high, low, versioned, variant, node] = groups.as_slice() else { return None };
    let lengths = [(high, 8), (low, 4), (versioned, 4), (variant, 4), (node, 12)];
    let well_formed =
        lengths.iter().all(|(group, len)| group.len() == *len && group.bytes().all(|digit| digit.is_ascii_hexdigit()));
    let marked = versioned.starts_with('7') && variant.starts_with(['8', '9', 'a', 'b', 'A', 'B']);
    let ms = u64::from_str_radix(&format!("{high}{low}"), 16).ok().filter(|_| well_formed && marked)?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}
