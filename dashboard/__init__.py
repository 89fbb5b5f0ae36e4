"""The Streamlit program. It arrives with a later release: this package is empty until then."""
