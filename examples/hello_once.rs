//! The example of the README: one charge, its replay, and another request under the same key.

use std::io;

use keyonce::{Failed, Fingerprint, Key, OnceError, Options, Outcome, Store};

fn charge(amount: &str) -> Result<Vec<u8>, Failed<io::Error>> {
    Ok(format!("charged {amount}").into_bytes()) // a real one would ask the payment provider
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Store::open("target/hello-keys", Options::default())?;
    let key = Key::new("shop-7/charges", "order-1001")?;
    for amount in ["9.99 EUR", "9.99 EUR", "10.00 EUR"] {
        match store.once(&key, Fingerprint::of(amount), |_| charge(amount)) {
            Ok(Outcome::Ran(_)) => println!("executed"),
            Ok(Outcome::Replayed(_)) => println!("replayed"),
            Err(OnceError::Mismatch(_)) => println!("mismatch"),
            Err(other) => return Err(other.into()),
        }
    }
    Ok(())
}
