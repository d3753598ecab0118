//! The example of the README: one charge, its replay, and another request under the same key.

use keyonce::{Failed, Fingerprint, Key, OnceError, Options, Outcome, Store};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Store::open("target/hello-keys", Options::default())?;
    let key = Key::new("shop-7/charges", "order-1001")?;
    for amount in ["9.99 EUR", "9.99 EUR", "10.00 EUR"] {
        let work = |_: &_| Ok::<_, Failed<std::io::Error>>(format!("charged {amount}").into_bytes());
        match store.once(&key, Fingerprint::of(amount), work) {
            Ok(Outcome::Ran(_)) => println!("executed"),
            Ok(Outcome::Replayed(_)) => println!("replayed"),
            Err(OnceError::Mismatch(_)) => println!("mismatch"),
            Err(other) => return Err(other.into()),
        }
    }
    Ok(())
}
