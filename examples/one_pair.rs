//! Reserves and completes keys, one after the other, each of them safe from a power loss: the shortest useful program,
//! and one whose system calls can be counted.
//!
//! ```text
//! cargo build --release --example one_pair
//! for pairs in 1 101; do
//!     rm -rf /tmp/one_pair
//!     strace -f -c -e trace=fdatasync,fsync,msync target/release/examples/one_pair /tmp/one_pair $pairs
//! done
//! ```
//!
//! Opening and closing a store sync, too, as often in the one run as in the other; what is left is two syncs for each
//! of the hundred pairs that the second run has more.

use std::error::Error;

use keyonce::{Body, Fingerprint, Key, Options, Reserve, Store};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().ok_or("usage: one_pair DIRECTORY [PAIRS]")?;
    let pairs: u64 = arguments.next().map_or(Ok(1), |pairs| pairs.parse())?;
    let store = Store::open(directory, Options::default())?;
    let syncs_before = store.stats().syncs;
    let (mut executed, mut replayed) = (0_u64, 0_u64);
    for order in 0..pairs {
        let key = Key::new("charges", format!("order-{order}"))?;
        match store.reserve(&key, Fingerprint::of("9.99 EUR"))? {
            Reserve::Fresh(reservation) => {
                // The work that must not happen twice goes here.
                if reservation.complete(b"paid")? == keyonce::Completion::Done {
                    executed += 1;
                }
            }
            Reserve::Replay(response) => {
                assert_eq!(response.body(), Body::Kept(b"paid"));
                replayed += 1;
            }
            other => return Err(format!("nobody else is at work here, and yet: {other:?}").into()),
        }
    }
    println!("executed {executed}, replayed {replayed}, log syncs {}", store.stats().syncs - syncs_before);
    Ok(())
}
