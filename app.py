"""The Streamlit lab: `lab ui`, or `streamlit run app.py`."""

import streamlit as st

from lab.ui import comparing, simulating

st.set_page_config(page_title="RLHF lab", layout="wide")

page = st.navigation(
    [
        st.Page(simulating.page, title="Simulate a scenario", url_path="simulate", default=True),
        st.Page(comparing.page, title="Compare two runs", url_path="compare"),
    ]
)
page.run()
